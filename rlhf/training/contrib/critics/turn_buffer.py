"""Replay buffer of turns: trajectories with turn places, rewards and endings.

The turns of a trajectory are transitions (o, a, r, o', done) that share their tokens: o ends where the turn begins, o'
where the next one does. They are therefore kept, drawn and read together: a forward pass over a trajectory is one over
all its states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf.batching.samples import Sample
from rlhf.credit.estimator import without_given
from rlhf.credit.flat_tokens import FlatTokens, nested, shape_of
from rlhf.data import Outcome, ScoredGroup, Values
from rlhf.inference.embedded.attention import packed_forward
from rlhf.training.critics.value_model import BackboneModel
from rlhf.training.critics.values import bare_rows

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
_CUT = (Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT)
_Long = TypeVar("_Long", bound=Sized)
_Item = TypeVar("_Item")


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a trajectory.

    Attributes:
        token_ids: `[L]`, the rows end to end, as the policy saw and made them.
        lengths: `[R]`, tokens of each row.
    """

    token_ids: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class Episode(Rows):
    """A trajectory of K turns in which the policy sampled something.

    Attributes:
        states: `[K]`, place in `token_ids` of the last token before each turn.
        ends: `[K]`, place of the last token of each turn.
        rewards: `[K]`, what each earned, in units of the score.
        is_cut: whether something would have followed the last turn.
    """

    states: Ints
    ends: Ints
    rewards: Floats
    is_cut: bool

    @property
    def n_turns(self) -> int:
        """Transitions."""
        return len(self.rewards)


def episodes_of(groups: Sequence[ScoredGroup], *, bootstrap: bool) -> list[Episode | None]:
    """Return each trajectory of `groups`, in order; None where the policy sampled nothing.

    Turns without sampled tokens hand their reward on as in `FlatTokens`.

    Args:
        groups: of a step.
        bootstrap: whether a limit cuts a trajectory, rather than ending it.
    """
    line = FlatTokens.of([without_given(group) for group in groups])
    rows: dict[int, list[Sample]] = {}
    for row in bare_rows(groups, "trajectory"):
        rows.setdefault(row.sequence, []).append(row)
    found: list[Episode | None] = []
    after_K = np.cumsum(line.turns_S).tolist()
    for number, trajectory in enumerate(t for group in groups for t in group.trajectories):
        own = rows.get(number)
        if own is None:
            found.append(None)
            continue
        turns = slice(after_K[number] - int(line.turns_S[number]), after_K[number])
        after = np.cumsum(line.tokens_K[turns])
        sampled = np.flatnonzero(np.concatenate([row.mask for row in own]))
        found.append(
            Episode(
                token_ids=np.concatenate([row.token_ids for row in own], dtype=np.int64),
                lengths=np.array([len(row) for row in own], np.int64),
                states=sampled[after - line.tokens_K[turns]] - 1,
                ends=sampled[after - 1],
                rewards=line.rewards_K[turns].astype(np.float32),
                is_cut=bootstrap and trajectory.outcome in _CUT,
            )
        )
    return found


def packed(episodes: Sequence[_Long], max_tokens: int) -> Iterator[list[_Long]]:
    """Batches of `episodes`, in order, of at most `max_tokens`; a longer episode is alone."""
    part: list[_Long] = []
    for episode in episodes:
        if part and sum(map(len, part)) + len(episode) > max_tokens:
            yield part
            part = []
        part.append(episode)
    if part:
        yield part


def shuffled(items: Sequence[_Item], epochs: int, size: int, rng: np.random.Generator) -> Iterator[list[_Item]]:
    """Minibatches of passes over `items`, each pass in an order of its own; the last of a pass may be smaller."""
    for _ in range(epochs):
        order = rng.permutation(len(items)).tolist()
        for at in range(0, len(order), size):
            yield [items[i] for i in order[at : at + size]]


def outputs_at(model: BackboneModel, parts: Sequence[Rows], *places: Sequence[Ints]) -> Tensor:
    """Outputs `[N, d]` of `model` at places in each of `parts`, those of the first argument first; one forward pass."""
    device = next(model.head.parameters()).device
    first = np.cumsum([0, *map(len, parts)])
    at = np.concatenate([own + begin for each in places for own, begin in zip(each, first, strict=False)])
    ids = torch.from_numpy(np.concatenate([part.token_ids for part in parts])).to(device)
    lengths = np.concatenate([part.lengths for part in parts]).tolist()
    return packed_forward(model, ids, lengths, torch.from_numpy(at).to(device))


def values_of_turns(groups: Sequence[ScoredGroup], found_K: npt.NDArray[np.float64]) -> list[Values]:
    """Give all tokens of a turn what was found for it, and cut it by group; states are worth 0."""
    tokens_K = FlatTokens.of([without_given(group) for group in groups]).tokens_K
    shapes = [shape_of(group) for group in groups]
    actions = nested(shapes, np.repeat(found_K, tokens_K))
    states = nested(shapes, np.zeros(int(tokens_K.sum())))
    return [
        Values(nothing, (0.0,) * len(group.trajectories), of_turns)
        for group, nothing, of_turns in zip(groups, states, actions, strict=True)
    ]


@dataclass
class TurnBuffer:
    """Replay buffer of trajectories, oldest first, of at most `capacity` turns, at least one trajectory."""

    capacity: int
    kept: list[Episode] = field(default_factory=list)

    @property
    def n_turns(self) -> int:
        """Turns kept."""
        return sum(e.n_turns for e in self.kept)

    def add(self, episodes: Sequence[Episode]) -> None:
        """Keep `episodes` and forget what there is no room for."""
        self.kept = [*self.kept, *episodes]
        excess, n = self.n_turns - self.capacity, 0
        while excess > 0 and n < len(self.kept) - 1:
            excess -= self.kept[n].n_turns
            n += 1
        self.kept = self.kept[n:]

    def state_dict(self) -> dict[str, Any]:
        """Everything kept, end to end in a few tensors."""
        arrays = {name: [getattr(e, name) for e in self.kept] for name in _ARRAYS}
        state: dict[str, Any] = {name: _joined(parts, _ARRAYS[name]) for name, parts in arrays.items()}
        sizes = [[len(parts[i]) for parts in arrays.values()] for i in range(len(self.kept))]
        return state | {
            "sizes": torch.tensor(sizes, dtype=torch.int32).view(-1, len(_ARRAYS)),
            "is_cut": torch.tensor([e.is_cut for e in self.kept], dtype=torch.bool),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        sizes = state["sizes"].tolist()
        columns = {
            name: torch.split(state[name], [row[i] for row in sizes]) if sizes else () for i, name in enumerate(_ARRAYS)
        }
        self.kept = [
            Episode(
                **{name: parts[i].numpy().astype(_ARRAYS[name][1]) for name, parts in columns.items()},
                is_cut=bool(state["is_cut"][i]),
            )
            for i in range(len(sizes))
        ]


#: Arrays of an episode: how they are stored, and what they are here.
_ARRAYS: Mapping[str, tuple[Any, Any]] = {
    "token_ids": (np.int32, np.int64),
    "lengths": (np.int32, np.int64),
    "states": (np.int32, np.int64),
    "ends": (np.int32, np.int64),
    "rewards": (np.float32, np.float32),
}


def _joined(parts: Sequence[npt.NDArray[Any]], of: tuple[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0), *parts]).astype(of[0]))
