"""Scripted engine: a Python function in the place of a model, for tests, examples and agents that are programs.

It is a real engine: it obeys token limits, stop ids, versions, seeds and sessions as any other.

    engine = ScriptedEngine(lambda text: "go north" if "north" in text else "look", tokenizer=tokenizer)
    engine = ScriptedEngine(lambda ids: (5, 6, 7))
    engine = ScriptedEngine(lambda text, rng: rng.choice(["left", "right"]), tokenizer=tokenizer, seeded=True)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf.data import Finish, Generation, PolicyWeights, Prompt, SamplingParams, WeightsForm
from rlhf.errors import DeliveryError, EngineError, boundary
from rlhf.inference.engine import check_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """Scripted reply, with log-probs.

    Attributes:
        content: text, or token ids.
        logprobs: in nats, of the first tokens; the rest have 0, which is probability one.
    """

    content: str | Sequence[int]
    logprobs: Sequence[float] = ()


class ScriptedEngine:
    """An engine that asks `function` for what a model would sample.

    A stop id is put at the end of what the function says unless one is there; what does not fit the limit on tokens is
    cut off, with `Finish.LENGTH`.

    Args:
        function: maps a prompt to text, ids or `ScriptedReply`. With `tokenizer` the prompt is its text, control tokens
            included, otherwise its ids. With `seeded` it is called as `function(prompt, rng)`, where `rng` is a
            `random.Random` of the request's seed. If it raises, the call fails with EngineError.
        tokenizer: needed for text.
        seeded: whether the function takes a random generator.
        max_context: most tokens of prompt and generation together.
        latency_s: seconds that each call takes.
        fails_on: numbers of the calls, from 0, that fail with EngineError.

    Attributes:
        n_calls: calls so far, failed ones included.
        sessions: names of the sessions that were used and not yet released.
        loaded: everything that `load` accepted, in order.
    """

    #: A function is no policy, and its log-probs are whatever it says.
    shares_policy: ClassVar[bool] = False

    #: Nothing is handed over but the version.
    weights_form: ClassVar[WeightsForm] = "shared"

    def __init__(
        self,
        function: Callable[..., str | Sequence[int] | ScriptedReply],
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        seeded: bool = False,
        max_context: int = 32768,
        latency_s: float = 0.0,
        fails_on: Collection[int] = (),
    ) -> None:
        self.function, self.tokenizer, self.seeded = function, tokenizer, seeded
        self.latency_s, self.fails_on = latency_s, frozenset(fails_on)
        self.n_calls = 0
        self.sessions: dict[str, asyncio.Event] = {}
        self.loaded: list[PolicyWeights] = []
        self.max_context, self.policy_version, self._closed = max_context, 0, False

    async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
        """Ask the function once.

        Raises:
            ContextFull: the prompt leaves no room for a token.
            EngineError: the engine is closed, the function raised or said nothing usable, or `fails_on` says so.
        """
        if self._closed:
            raise EngineError("the engine is closed", where="ScriptedEngine.generate")
        call, self.n_calls = self.n_calls, self.n_calls + 1
        version = self.policy_version
        released = self.sessions.setdefault(session, asyncio.Event())
        if call in self.fails_on:
            raise EngineError("this call is scripted to fail", where=f"ScriptedEngine call {call}")
        room = check_prompt(prompt, "ScriptedEngine.generate", max_context=self.max_context)
        await asyncio.sleep(0)  # others get their turn, as with any engine
        if self.latency_s and await _happens(released, self.latency_s):
            return Generation(prompt, (), (), Finish.ABORT, version)
        with boundary(EngineError, where=f"ScriptedEngine call {call}"):
            said = self._ask(prompt, params)
            return self._finish(prompt, said, min(params.max_tokens, room), version)

    async def release(self, session: str) -> None:
        """Forget a session; its calls that still wait return at once, with `Finish.ABORT`."""
        released = self.sessions.pop(session, None)
        if released is not None:
            released.set()

    async def load(self, weights: PolicyWeights) -> None:
        """Take over the version. Raises DeliveryError if it goes back."""
        if weights.version < self.policy_version:
            raise DeliveryError(
                "weights are older than those in use",
                where="ScriptedEngine.load",
                got=f"version {weights.version}",
                expected=f"at least {self.policy_version}",
            )
        self.policy_version = weights.version
        self.loaded.append(weights)

    async def close(self) -> None:
        """Release every session; later calls fail."""
        self._closed = True
        for session in list(self.sessions):
            await self.release(session)

    def _ask(self, prompt: Prompt, params: SamplingParams) -> ScriptedReply:
        shown: Any = prompt.token_ids
        if self.tokenizer is not None:
            shown = self.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
        said = self.function(shown, random.Random(params.seed)) if self.seeded else self.function(shown)
        return said if isinstance(said, ScriptedReply) else ScriptedReply(said)

    def _finish(self, prompt: Prompt, said: ScriptedReply, limit: int, version: int) -> Generation:
        ids = self._ids(said.content)
        stop = next((i for i, token in enumerate(ids) if token in prompt.stop_ids), None)
        ids = ids[: stop + 1] if stop is not None else ids + prompt.stop_ids[:1]
        ids = ids[:limit]
        logprobs = [float(x) for x in said.logprobs][: len(ids)]
        logprobs += [0.0] * (len(ids) - len(logprobs))
        ended = bool(ids) and ids[-1] in prompt.stop_ids
        return Generation(prompt, ids, tuple(logprobs), Finish.STOP if ended else Finish.LENGTH, version)

    def _ids(self, content: str | Sequence[int]) -> tuple[int, ...]:
        if not isinstance(content, str):
            return tuple(int(i) for i in content)
        if self.tokenizer is None:
            raise EngineError(
                "the function said text, but the engine has no tokenizer",
                where="ScriptedEngine",
                hint="give `tokenizer=...`, or let the function return ids",
            )
        return tuple(self.tokenizer.encode(content, add_special_tokens=False))


async def _happens(event: asyncio.Event, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
