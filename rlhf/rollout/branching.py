"""Branch points of attempts: between two turns, or within a reply of the policy.

A reply within which attempts part is recorded in pieces, each a generation of its own whose prompt is the piece before
it, whole: what is common is then the same generations in all of them, which is how estimators find a tree.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhf.data import Generation, Message, Trajectory, Turn
from rlhf.data.generation import calls_of, piece_of


@dataclass(frozen=True, slots=True)
class Fork:
    """Branch point in a turn: after `n_tokens` (at least 1) of call number `call`, from 0."""

    call: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The shared beginning of a turn that continues differently.

    Attributes:
        calls: the pieces of each call that is answered as it was.
        pieces: of the call after these, what is kept of the answer.
    """

    calls: tuple[tuple[Generation, ...], ...]
    pieces: tuple[Generation, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """Point where an attempt leaves another attempt at the same task.

    Attributes:
        parent: number of that attempt.
        turns: what they have in common, from the first turn on, generations included.
        messages: what the agent is told beside the messages of the task.
        fork: where in the turn after these they part; None before its first token.
        head: what they have in common of that turn; `split_generations` finds it.
    """

    parent: int
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...] = ()
    fork: Fork | None = None
    head: SharedPrefix | None = None

    @property
    def digest(self) -> str:
        """Digest of the turns and tokens that a branch leaves from; equal number and digest mean the same attempt."""
        head = () if self.head is None else (*self.head.calls, self.head.pieces)
        said = [(turn.action.text, turn.reply, [g.token_ids for g in turn.generations]) for turn in self.turns]
        calls = [[g.token_ids for g in call] for call in head]
        parts = (self.parent, said, [(m.role.value, m.content) for m in self.messages], self.fork, calls)
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def rejoined(self, attempt: Trajectory) -> Trajectory:
        """Return a stored attempt of this branch that shares the turns and pieces of the present objects.

        What attempts share is the same objects in all of them, by which it is known and counted once.
        """
        n = len(self.turns)
        own = attempt.turns[n:]
        if self.head is not None and own:
            shared = (*itertools.chain(*self.head.calls), *self.head.pieces)
            first = own[0]
            generations = (*shared, *first.generations[len(shared) :])
            own = (replace(first, action=replace(first.action, generations=generations)), *own[1:])
        return replace(attempt, turns=(*self.turns[: len(attempt.turns)], *own))


def split_generations(group: Sequence[Trajectory], branches: Sequence[Branch]) -> tuple[list[Trajectory], list[Branch]]:
    """Record in pieces the replies within which branches leave.

    Args:
        group: all attempts so far.
        branches: of the next round.

    Returns:
        The attempts, with the same pieces wherever they hold the same reply, and the branches with their heads. Without
        a fork both come back as they were.
    """
    by_number = {t.attempt: t for t in group}
    cuts: dict[int, set[int]] = {}
    for branch in branches:
        if branch.fork is not None:
            turn = by_number[branch.parent].turns[len(branch.turns)]
            at = branch.fork.n_tokens
            for g in calls_of(turn.generations)[branch.fork.call]:
                if 0 < at < g.n_tokens:
                    cuts.setdefault(id(g), set()).add(at)
                at -= g.n_tokens
    made: dict[int, tuple[Generation, ...]] = {}
    turns: dict[int, Turn] = {}

    def renewed(turn: Turn) -> Turn:
        if id(turn) not in turns:
            pieces = [made.setdefault(id(g), _cut(g, cuts.get(id(g), ()))) for g in turn.generations]
            is_cut = any(len(p) > 1 for p in pieces)
            flat = tuple(g for p in pieces for g in p)
            turns[id(turn)] = replace(turn, action=replace(turn.action, generations=flat)) if is_cut else turn
        return turns[id(turn)]

    if not cuts:
        return list(group), [_headed(b, by_number[b.parent]) for b in branches]
    found = [replace(t, turns=tuple(map(renewed, t.turns))) for t in group]
    by_number = {t.attempt: t for t in found}
    return found, [_headed(replace(b, turns=tuple(map(renewed, b.turns))), by_number[b.parent]) for b in branches]


def _cut(generation: Generation, at: Sequence[int] | set[int]) -> tuple[Generation, ...]:
    if not at:
        return (generation,)
    ends = [*sorted(at), generation.n_tokens]
    return tuple(piece_of(generation, a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True))


def _headed(branch: Branch, parent: Trajectory) -> Branch:
    if branch.fork is None:
        return branch
    calls = calls_of(parent.turns[len(branch.turns)].generations)
    kept, left = [], branch.fork.n_tokens
    for piece in calls[branch.fork.call]:
        if left <= 0:
            break
        kept.append(piece)
        left -= piece.n_tokens
    return replace(branch, head=SharedPrefix(tuple(calls[: branch.fork.call]), tuple(kept)))
