"""Constant-size memory: the policy carries on what it wrote last, and nothing else.

Source: MEM1, arXiv 2506.15841: each reply begins with what is to be remembered, which takes the place of all that went
before. Here every reply stands in a row with exactly the prompt that it was sampled from, so that the log-probs of the
trainer are those of the sampler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import PolicyHandle
from agents.memory.base import Exchange, MemoryBase, MemoryContext, conversation
from agents.memory.window import newest
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ConstantMemory(MemoryBase):
    """Shows the opening, the last reply with the thoughts it begins with, and the newest observation.

    The thoughts are the memory: what the policy does not write down again is forgotten. Needs `think: require`. A reply
    in which no action could be read does not take the place of what was remembered before it: the one before is shown,
    and the observation that it led to with what was said of the other. The prompt is bounded by the opening, one reply
    and the observations around it, however long the episode.
    """

    needs_thoughts: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("recall",)
    asks: ClassVar[bool] = False
    instruction: ClassVar[str] = (
        "Only your last reply is kept: write inside <think>...</think> everything that you will need later."
    )

    max_turns: Annotated[int, Field(ge=1)] | None = None
    """Turns of an episode, where the policy is to be told with each observation how many are left."""

    async def recall(self, past: Sequence[Exchange], policy: PolicyHandle, notes: Mapping[str, str]) -> MemoryContext:
        """Show the opening and the newest exchange in which an action was read."""
        shown = list(newest(_taken_in(past), 1))
        if self.max_turns is not None:
            left = max(self.max_turns - sum(map(_was_sampled, past)), 1)
            last = shown[-1]
            hint = f"{last.observation}\n[{left} {'turn' if left == 1 else 'turns'} left]"
            shown[-1] = replace(last, observation=hint)
        return MemoryContext(conversation(shown))


def _was_sampled(exchange: Exchange) -> bool:
    """True for a turn of the policy's own, which counts; turns given by a start state have no ids."""
    return exchange.reply is not None and exchange.reply.token_ids is not None


def _taken_in(past: Sequence[Exchange]) -> Sequence[Exchange]:
    """`past` up to the last reply with an action, with later observations joined into one."""
    n_read = next((n for n in range(len(past) - 1, 0, -1) if past[n - 1].action), 0)
    first, last = past[n_read], past[-1]
    if first is last:
        return past
    return (*past[:n_read], replace(last, observation=f"{first.observation}\n{last.observation}"))
