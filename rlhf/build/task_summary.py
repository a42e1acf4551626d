"""Sizes of a data set's splits, and prompts too long for the context, before training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agents.base import History
from environments.base import Capabilities, member_environments, properties_of
from rlhf.data import Message, Prompt, Task
from rlhf.errors import EnvError, RecipeError
from rlhf.gateway.agent import ExternalAgent
from rlhf.recipe import Recipe
from rlhf.recipe.view import environments_of_run
from rlhf.rollout.limits import Limits
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.tasks import tasks_of
from rlhf.training.policy.model import FromScratch

#: Prompts of each split that are measured, the first ones.
_N_MEASURED = 5_000


async def tell_splits(recipe: Recipe, renderer: Renderer, max_context: int, say: Callable[[str], None]) -> None:
    """Print the number of tasks of each split, and caution of merged rows and of prompts that are too long.

    Other environments make their tasks, and what they show first is known when an episode begins. An agent that does
    not ask the policy first is not looked at.

    Args:
        recipe: whose environment, agent and limits count.
        renderer: of the policy.
        max_context: tokens of prompt and answer together.
        say: is told.

    Raises:
        RecipeError: no prompt of a split leaves room for a single token.
    """
    for path, seen in environments_of_run(recipe):
        if properties_of(seen.environment).judged_by_rewards:
            await _tell_world(seen, path, renderer, max_context, say)


async def refuse_long_prompts(recipe: Recipe) -> None:
    """Raise RecipeError where no prompt of a split can leave room, before the tokenizer's texts are collected.

    Measured by a tokenizer trained on these prompts themselves, which makes fewer tokens of them than one trained on
    demonstrations. A split with a prompt of fewer bytes than the context is passed over.
    """
    policy = recipe.policy
    if not isinstance(policy, FromScratch):
        return
    max_context = min(policy.max_context, recipe.limits.max_context or policy.max_context)
    for path, seen in environments_of_run(recipe):
        if not properties_of(seen.environment).judged_by_rewards or isinstance(seen.agent, ExternalAgent):
            continue
        for split, tasks in _splits(seen):
            asked = _asked(tasks)
            if not asked or min(len(str(task.info["prompt"]).encode()) for task in asked) < max_context:
                continue
            texts = _Texts()
            await _lengths(asked, seen.agent, texts, max_context)
            lengths = await _lengths(asked, seen.agent, Renderer(policy.tokenizer(texts.said)), max_context)
            _refuse_full(split, lengths, max_context, path)


async def _tell_world(
    recipe: Recipe, path: str, renderer: Renderer, max_context: int, say: Callable[[str], None]
) -> None:
    splits = dict(_splits(recipe))
    counts = ", ".join(f"{len(tasks):,} in {split}" for split, tasks in splits.items())
    say(f"tasks{f' of {path[:-1]}' if path else ''}: {counts}")
    if merged := ", ".join(f"{n:,} in {split}" for split in splits if (n := _n_merged(recipe.environment, split))):
        say(
            f"caution: rows with the prompt and the answer of an earlier row{f' of {path[:-1]}' if path else ''}: "
            f"{merged}; each is one task with that row, and counts once"
        )
    if isinstance(recipe.agent, ExternalAgent):  # its program writes the prompts
        return
    for split, tasks in splits.items():
        lengths = await _lengths(_asked(tasks), recipe.agent, renderer, max_context)
        for told in _cautions(split, lengths, recipe.limits, max_context, path):
            say(f"caution: {told}")


def _splits(recipe: Recipe) -> Iterator[tuple[str, Sequence[Task]]]:
    """The splits of the environment with their tasks; those that have none are passed over."""
    for split in properties_of(recipe.environment).splits:
        with suppress(EnvError):
            yield split, tasks_of(recipe.environment, split)


def _n_merged(environment: object, split: str) -> int:
    """Rows of a split that are no tasks; in the environments that `environment` is made of, unless it counts them."""
    if own := Capabilities(environment).n_merged:
        return own(split)
    return sum(_n_merged(member, split) for _, member in member_environments(environment))


def _asked(tasks: Sequence[Task]) -> list[Task]:
    return [task for task in tasks[:_N_MEASURED] if isinstance(task.info.get("prompt"), str)]


def _refuse_full(split: str, lengths: Mapping[str, int], max_context: int, path: str) -> None:
    """Raise RecipeError where no prompt of a split leaves room."""
    if lengths and (least := min(lengths.values())) >= max_context:
        raise RecipeError(
            "no prompt leaves room for an answer in the context",
            where=f"{path}environment, split {split!r}",
            got=f"{len(lengths):,} of {len(lengths):,} prompts of {path}{split}, of {least:,} tokens and more",
            expected=f"less than the context of {max_context:,} tokens",
            hint="raise policy.max_context or limits.max_context, or shorten the prompts or agent.system",
        )


def _cautions(split: str, lengths: Mapping[str, int], limits: Limits, max_context: int, path: str) -> Iterator[str]:
    """Yield what is wrong with the prompts of a split. Raises RecipeError where none leaves room."""
    _refuse_full(split, lengths, max_context, path)
    full = {name: n for name, n in lengths.items() if n >= max_context}
    tight = {name: n for name, n in lengths.items() if max_context - limits.max_tokens < n < max_context}
    of = f"of {len(lengths):,} prompts of {path}{split}"
    longest = max(lengths, key=lengths.__getitem__, default="")
    if full:
        yield (
            f"{len(full):,} {of} fill the context of {max_context:,} tokens, the longest with {lengths[longest]:,} "
            f"({longest}): attempts at them end with token_limit and learn nothing; take these rows out, or raise "
            "policy.max_context or limits.max_context"
        )
    if tight:
        name = max(tight, key=tight.__getitem__)
        yield (
            f"{len(tight):,} {of} leave less than {path}limits.max_tokens: {limits.max_tokens:,} for an answer in the "
            f"context of {max_context:,} tokens, the least {max_context - tight[name]:,} ({name}): longer answers are "
            "cut there"
        )


async def _lengths(tasks: Sequence[Task], agent: Any, renderer: Renderer | _Texts, max_context: int) -> dict[str, int]:
    """Tokens of the first prompt at each task, by its name with its row; nothing of agents that ask nothing."""
    found: dict[str, int] = {}
    for task in tasks:
        policy = _Measuring(renderer, max_context)
        opening = str(task.info["prompt"])
        try:
            await agent.act(History(Task(task.id, messages=task.messages, info=task.info), opening), policy)
        except _Measured:
            found[f"{task.id}, row {task.info['row']}" if "row" in task.info else task.id] = policy.n
        except Exception:  # of whatever agent this is: its own first turn will tell
            continue
    return found


@dataclass
class _Texts:
    """Substitute for a renderer without a tokenizer: collects the texts of prompts."""

    said: list[str] = field(default_factory=list)

    def exceeds(self, text: str, n: int) -> bool:
        return False

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), role: str = "") -> Prompt:
        self.said += [m.content for m in messages]
        return Prompt((0,))


class _Measured(Exception):
    """The prompt is known."""


@dataclass
class _Measuring:
    """A policy that measures the first prompt and answers nothing."""

    renderer: Renderer | _Texts
    max_context: int
    n: int = field(default=0)

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        role: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Any:
        self.n = self.n_tokens(messages, tools, role)
        raise _Measured

    def n_tokens(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), role: str = "") -> int:
        """Tokens of the prompt; the context where a message alone is longer."""
        if any(self.renderer.exceeds(m.content, self.max_context) for m in messages if m.token_ids is None):
            return self.max_context
        return self.renderer.prompt(messages, tools, role).n_tokens
