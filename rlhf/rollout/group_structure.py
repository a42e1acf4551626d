"""Structure of a group: independent attempts, branches of trees, or retries.

A tree begins as one attempt from the task's start. In each round, states of its attempts are chosen, and attempts are
made that leave from there: what led to the state is replayed in a fresh episode of the environment, generations and
all, and from then on the policy samples anew. A chain makes its attempts one after another, and each is told of those
before. All attempts at a task, of whichever tree or chain, are one group.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.capabilities import Capability, CapabilityView
from rlhf.checking import CheckContext, Problem
from rlhf.data import Message, Role, Task, Trajectory
from rlhf.data.generation import calls_of
from rlhf.rollout.branching import Branch, Fork
from rlhf.rollout.limits import Limits
from rlhf.settings import STRICT


@runtime_checkable
class GroupStructure(Protocol):
    """Structure of a group: independent attempts, trees or chains of retries.

    A frozen dataclass whose fields are its recipe keys; with an attribute `replays = True` if it ever branches, and
    `shows_attempts = True` if an attempt reads what was said in others, which a game of several seats cannot have. A
    method `posed(task, attempt)` gives the task as that attempt reads it. One that asks a judge where to branch has a
    method `branches_by_value(task, group, rng, timeout_s)`, async, in the place of `branches`; `timeout_s` is the limit
    of each call of a reward.
    """

    @property
    def n_rounds(self) -> int:
        """Rounds of branching after the attempts from the start."""

    def n_from_start(self, group_size: int) -> int:
        """Return how many of `group_size` attempts are made from the task's start.

        Raises:
            ValueError: groups of that size cannot be made.
        """

    def branches(self, group: Sequence[Trajectory], rng: random.Random) -> list[Branch]:
        """Branches of the next round, given all attempts so far in order of their numbers."""


class _Optional(CapabilityView):
    replays = Capability[object](False)
    shows_attempts = Capability(False, bool)
    posed = Capability[Callable[[Task, int], Task] | None](None, Callable)
    branches_by_value = Capability[Callable[..., Awaitable[list[Branch]]] | None](None, Callable)


def replays(part: object) -> bool:
    """True if episodes of this sampler or rollout begin with a replay (attribute `replays`)."""
    return bool(_Optional(part).replays)


def shows_attempts(grouping: object) -> bool:
    """True if attempts of this group structure read other attempts, observations of all seats included."""
    return _Optional(grouping).shows_attempts


def posed(grouping: object, task: Task, attempt: int) -> Task:
    """Return the task as an attempt reads it, of a structure with a method `posed(task, attempt)`; else as it is."""
    told = _Optional(grouping).posed
    return task if told is None else told(task, attempt)


async def branches_of(
    grouping: GroupStructure,
    task: Task,
    group: Sequence[Trajectory],
    rng: random.Random,
    timeout_s: float = Limits().reward_timeout_s,
) -> list[Branch]:
    """Return the branches of the next round, of a structure that asks a judge or of one that does not."""
    by_value = _Optional(grouping).branches_by_value
    return grouping.branches(group, rng) if by_value is None else await by_value(task, group, rng, timeout_s)


def unreplayable(section: str, part: object, path: str, context: CheckContext) -> Iterator[Problem]:
    """Yield a problem where `part`, the `section` of `path`, replays what the environment may not repeat."""
    if replays(part) and not context.recipe.properties.replayable:
        environment = context.kind_of("environment", context.recipe.environment)
        yield Problem(
            "episodes would begin with a replay, and this environment is not replayable",
            where=f"{path}.{section}.kind",
            got=f"{context.kind_of(section, part)} in {environment}",
            expected="an environment whose `properties` say replayable=True",
            do="declare it if true, `rlhf check environment` tests it; or remove the key",
        )


def unmakeable(rollout: GroupStructure, group_size: int, path: str) -> Iterator[Problem]:
    """Yield a problem where `rollout` cannot make groups of the size that `path` has."""
    try:
        rollout.n_from_start(group_size)
    except ValueError as error:
        yield Problem(
            "groups of this size cannot be made",
            where=f"{path}.group_size",
            got=str(group_size),
            expected=str(error),
            do="group_size counts the attempts of all trees of a task",
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Independent:
    """Independent attempts from the task's start."""

    n_rounds: ClassVar[int] = 0

    def n_from_start(self, group_size: int) -> int:
        """All of them."""
        return group_size

    def branches(self, group: Sequence[Trajectory], rng: random.Random) -> list[Branch]:
        """There are none."""
        return []


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Tree:
    """M trees of 1 + L·N·T attempts.

    In each of L rounds, N states of each tree are chosen, and T attempts leave from each. `group_size` is the attempts
    of all trees together: M = group_size / (1 + L·N·T), which has to be a whole number.

    The states are those in which the policy was to act, in any attempt of the tree; what several attempts share counts
    once. The state at the start is not among them, for an attempt from there shares nothing: it is another tree. It is
    branched from where a tree has no other state. `random` draws states with replacement, all alike. `surprisal` takes
    the N states whose next turn held the least likely token, by −log π(token) in nats as the engine reports it, and
    begins again from the first where there are fewer than N.

    A tree whose first attempt ended with an infrastructure error has no states at all: its branches are not made.

    With `at: token` branches leave within replies: what came before the chosen token stays, and the policy samples from
    there on. Places are the tokens of all replies but the first of each, and of each piece that a branch has left
    behind; a reply of one token has none. Where a tree has no place, it is branched from before a turn.

    Sources: Tree-GRPO, arXiv 2509.21240 (`random`, `turn`, T = 1; there the start may be drawn, and some leaves are
    left out); TreeRL, arXiv 2506.11902 (`surprisal`, `token`; there tokens after words such as "conclusion" are left
    out).
    """

    replays: ClassVar[bool] = True

    branches_per_round: Annotated[int, Field(ge=1)] = 2
    """N, the states of a tree that are branched from in one round."""
    continuations: Annotated[int, Field(ge=1)] = 1
    """T, the attempts that continue from each of them."""
    rounds: Annotated[int, Field(ge=1)] = 1
    """L; later rounds also branch from the attempts of earlier ones."""
    choose: Literal["random", "surprisal"] = "random"
    """Choice of states to branch from."""
    at: Literal["turn", "token"] = "turn"
    """Place of branches: before a turn, or within a reply, before one of its tokens but the first."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse branches within replies where stop strings end them: an engine sees none that began before."""
        strings = context.recipe.limits.stop_strings
        if self.at == "token" and strings and not context.is_trained:
            yield Problem(
                "a stop string that begins before a branch point would not end the reply after it",
                where=context.at("at"),
                got=f"token, with limits.stop_strings: {list(strings)}",
                expected="turn",
                do="write at: turn, or remove limits.stop_strings",
            )

    @property
    def n_rounds(self) -> int:
        """Rounds of branching after the attempts from the start."""
        return self.rounds

    @property
    def n_leaves(self) -> int:
        """Attempts of one tree."""
        return 1 + self.rounds * self.branches_per_round * self.continuations

    def n_from_start(self, group_size: int) -> int:
        """Return the number of trees. Raises ValueError where there is no whole number of them."""
        n_trees, left = divmod(group_size, self.n_leaves)
        if left or not n_trees:
            raise ValueError(f"a multiple of 1 + rounds x branches_per_round x continuations = {self.n_leaves}")
        return n_trees

    def branches(self, group: Sequence[Trajectory], rng: random.Random) -> list[Branch]:
        """Return the next round's branches, tree by tree."""
        return [
            Branch(state.attempt.attempt, state.attempt.turns[: state.turn], fork=state.fork)
            for attempts in trees_of(group)
            for state in self._chosen(self._open(attempts), rng)
            for _ in range(self.continuations)
        ]

    def _open(self, attempts: Sequence[Trajectory]) -> list[_State]:
        """Return what the attempts of a tree may be left from."""
        if self.at == "token" and (places := _within(attempts)):
            return places
        states = [state for t in attempts for state in _states(t)]
        return [s for s in states if s.turn > s.attempt.n_given] or states

    def _chosen(self, states: list[_State], rng: random.Random) -> list[_State]:
        n = self.branches_per_round if states else 0
        if self.choose == "random":
            return rng.choices(states, k=n) if n else []
        order = sorted(states, key=lambda state: -state.surprisal)  # stable: of equals, the one that was met first
        return [order[i % len(order)] for i in range(n)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Retry:
    """Retry chains of 1 + `retries` attempts at a task, each shown the earlier ones.

    The policy reads the earlier attempts of its chain, opening, actions and replies, and what it is to do about them,
    before the observation of the fresh episode. `group_size` is the attempts of all chains together:
    M = group_size / (1 + retries), which has to be a whole number. After an infrastructure error a chain ends.

    With `until: solved` a chain also ends with an attempt that the environment calls solved, so a group may hold fewer
    attempts, and being asked again means to have failed. With `until: end` nobody is told how an attempt went: every
    chain has all of its attempts.

    An attempt has the earlier ones in its prompt alone: it is a trajectory of its own, with its own score, and all
    attempts at a task are one group.

    Sources: RISE, arXiv 2407.18219 (there all attempts of a chain are one conversation); Reflexion, arXiv 2303.11366.
    """

    shows_attempts: ClassVar[bool] = True

    retries: Annotated[int, Field(ge=1)] = 2
    """Maximum retries after the first attempt."""
    until: Literal["solved", "end"] = "solved"
    """Stop a chain once it is solved, or never."""
    ask: str | None = None
    """Message after the earlier attempts; null asks for another way after a failure, and for a better one if success is
    unknown."""
    max_shown: Annotated[int, Field(ge=1)] = 2
    """Number of previous attempts shown."""
    max_chars: Annotated[int, Field(ge=40)] = 2000
    """Maximum length of a previous attempt; its end is shown."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse games of several seats, and `until: solved` where a reward decides success, after the retries."""
        seats = context.recipe.properties.seats
        if len(seats) > 1 and not context.is_trained:
            yield Problem(
                "a retry would show a seat the private observations of other seats",
                where=f"{context.path}.kind",
                got=f"{context.kind_of('rollout', self)}, for the seats {', '.join(seats)}",
                expected="a game of one seat",
                do="use rollout: {kind: independent}",
            )
        solving = next((name for name, w in context.recipe.rewards.items() if w.success_threshold is not None), None)
        if solving and self.until == "solved" and context.learns and not context.is_trained:
            yield Problem(
                "retries stop before rewards are computed",
                where=context.at("until"),
                got=f"solved, which rewards.{solving}.success_threshold defines",
                expected="end",
                do="write until: end, or use rollout: {kind: independent}",
            )

    @property
    def n_rounds(self) -> int:
        """Rounds of retries."""
        return self.retries

    def n_from_start(self, group_size: int) -> int:
        """Return the number of chains. Raises ValueError where there is no whole number of them."""
        n_chains, left = divmod(group_size, 1 + self.retries)
        if left or not n_chains:
            raise ValueError(f"a multiple of 1 + retries = {1 + self.retries}")
        return n_chains

    def branches(self, group: Sequence[Trajectory], rng: random.Random) -> list[Branch]:
        """Return the next attempt of each unfinished chain."""
        tried = {t.parent for t in group}
        by_number = {t.attempt: t for t in group}
        ends = [t for t in group if t.attempt not in tried and not t.outcome.is_infrastructure_error]
        found = []
        for end in ends:
            chain = [end]
            while (parent := chain[0].parent) is not None:
                chain.insert(0, by_number[parent])
            if len(chain) <= self.retries and not (end.solved and self.until == "solved"):
                found.append(Branch(end.attempt, end.turns[: end.n_given], (self.told(chain),)))
        return found

    def told(self, chain: Sequence[Trajectory]) -> Message:
        """Return the message about earlier attempts for the next one."""
        first = max(0, len(chain) - self.max_shown)
        shown = [f"Attempt {i}:\n{self._text(t)}" for i, t in enumerate(chain[first:], start=first + 1)]
        known = "That attempt failed. Begin anew, and go another way."
        unknown = "Begin anew, and do it better if you can."
        ask = self.ask if self.ask is not None else known if self.until == "solved" else unknown
        return Message(Role.USER, "\n".join([*shown, ask]))

    def _text(self, t: Trajectory) -> str:
        lines = [t.opening, *(line for turn in t.turns for line in (f"> {turn.action.text}", turn.reply))]
        text = "\n".join(lines)
        return text if len(text) <= self.max_chars else f"...{text[3 - self.max_chars :]}"


def trees_of(group: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Return the attempts of each tree, in order of their numbers."""
    trees: dict[int, list[Trajectory]] = {}
    root_of: dict[int, int] = {}
    for t in group:
        root_of[t.attempt] = t.attempt if t.parent is None else root_of[t.parent]
        trees.setdefault(root_of[t.attempt], []).append(t)
    return list(trees.values())


@plain_dataclass(frozen=True, slots=True)
class _State:
    """State in which the policy was to act: before a turn of an attempt."""

    attempt: Trajectory
    turn: int
    fork: Fork | None = None
    logprob: float = 0.0

    @property
    def surprisal(self) -> float:
        """Surprisal of the token at its place, else of the turn's least likely token, nats; 0 without tokens."""
        if self.fork is not None:
            return -self.logprob
        return max((-x for g in self.attempt.turns[self.turn].generations for x in g.logps.tolist()), default=0.0)


def _states(t: Trajectory) -> list[_State]:
    """New states of an attempt; a branch shares its branch point with its parent."""
    if t.outcome.is_infrastructure_error:
        return []
    first = t.n_given if t.parent is None else t.n_shared + 1
    return [_State(t, k) for k in range(first, len(t.turns))]


def _within(attempts: Iterable[Trajectory]) -> list[_State]:
    """Places within replies, each once; not before the first token of a reply or a piece."""
    seen: set[int] = set()
    found: list[_State] = []
    for t in (t for t in attempts if not t.outcome.is_infrastructure_error):
        for k, turn in enumerate(t.turns):
            for number, call in enumerate(calls_of(turn.generations)):
                n = 0
                for g in call:
                    if id(g) not in seen and g.usage is None:  # text of a server has no tokens to branch between
                        seen.add(id(g))
                        places = enumerate(g.logps[1:].tolist(), start=n + 1)
                        found += [_State(t, k, Fork(number, at), logprob) for at, logprob in places]
                    n += g.n_tokens
    return found
