"""How the attempts at one task come about: each on its own, or as the branches of trees.

A tree begins as one attempt from the task's start. In each round, states of its attempts are chosen, and attempts are
made that leave from there: what led to the state is replayed in a fresh episode of the environment, generations and
all, and from then on the policy samples anew. All attempts at a task, of whichever tree, are one group.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.data import Trajectory
from rlhf.rollout.episode import Branch
from rlhf.settings import STRICT


@runtime_checkable
class Grouping(Protocol):
    """A frozen dataclass whose fields are its recipe keys; with an attribute `replays = True` if it ever branches."""

    @property
    def n_rounds(self) -> int:
        """Rounds of branching after the attempts from the start."""
        ...

    def n_from_start(self, group_size: int) -> int:
        """Return how many of `group_size` attempts are made from the task's start.

        Raises:
            ValueError: groups of that size cannot be made.
        """
        ...

    def branches(self, group: Sequence[Trajectory], rng: random.Random) -> list[Branch]:
        """Return what the next round of attempts begins with, given all attempts so far in order of their numbers."""
        ...


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Independent:
    """Every attempt is made from the task's start."""

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

    A tree whose first attempt ended by the failure of a part has no states at all: its branches are not made.

    Sources: Tree-GRPO, arXiv 2509.21240 (`random`, T = 1; there the start may be drawn, and some leaves are left out);
    TreeRL, arXiv 2506.11902 (`surprisal`; there a branch leaves from a token, here from the turn that the token is in,
    which is sampled anew as a whole).
    """

    replays: ClassVar[bool] = True

    branches_per_round: Annotated[int, Field(ge=1)] = 2
    """N, the states of a tree that are branched from in one round."""
    continuations: Annotated[int, Field(ge=1)] = 1
    """T, the attempts that leave from each of them."""
    rounds: Annotated[int, Field(ge=1)] = 1
    """L; later rounds also branch from the attempts of earlier ones."""
    choose: Literal["random", "surprisal"] = "random"
    """How states are chosen."""

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
        trees: dict[int, list[_State]] = {}
        root_of: dict[int, int] = {}
        for t in group:
            root_of[t.attempt] = t.attempt if t.parent is None else root_of[t.parent]
            trees.setdefault(root_of[t.attempt], []).extend(_states(t))
        return [
            Branch(state.attempt.attempt, state.attempt.turns[: state.turn])
            for states in trees.values()
            for state in self._chosen([s for s in states if s.turn > s.attempt.n_given] or states, rng)
            for _ in range(self.continuations)
        ]

    def _chosen(self, states: list[_State], rng: random.Random) -> list[_State]:
        n = self.branches_per_round if states else 0
        if self.choose == "random":
            return rng.choices(states, k=n) if n else []
        order = sorted(states, key=lambda state: -state.surprisal)  # stable: of equals, the one that was met first
        return [order[i % len(order)] for i in range(n)]


@plain_dataclass(frozen=True, slots=True)
class _State:
    """Where the policy was to act: before a turn of an attempt."""

    attempt: Trajectory
    turn: int

    @property
    def surprisal(self) -> float:
        """Of the least likely token of the turn, nats; 0 where nothing was sampled."""
        return max((-x for g in self.attempt.turns[self.turn].generations for x in g.logprobs), default=0.0)


def _states(t: Trajectory) -> list[_State]:
    """Return the states that no earlier attempt has met: a branch shares the one it leaves from with its parent."""
    if t.outcome.is_failure_of_a_part:
        return []
    first = t.n_given if t.parent is None else t.n_shared + 1
    return [_State(t, k) for k in range(first, len(t.turns))]
