"""HICRA: planning tokens get more of the credit and less of the blame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.groups import call_numbers, with_counters
from rlhf.credit.wrapper import AdvantageWrapper
from rlhf.data import Credit, ScoredGroup, Trajectory
from rlhf.errors import RecipeError
from rlhf.settings import STRICT

Ids = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HICRA(AdvantageWrapper):
    """Ã_t = A_t + α |A_t| on planning tokens, A_t elsewhere; A of `inner`.

    Planning tokens are those of a strategic gram, a sequence of token ids that a generation contains, and those between
    the ids of an opening and a closing tag such as `<plan>` and `</plan>`; without a closing tag, to the end of the
    generation. A text has different ids at the start of a line and after a space: list both. No gram found leaves the
    inner estimator as it is; `credit/n_planning_tokens` counts.

    The authors mine their grams from solutions with a sentence encoder; here they are given.

    Source: Emergent Hierarchical Reasoning in LLMs through Reinforcement Learning, arXiv 2509.03646.
    """

    alpha: Annotated[float, Field(ge=0)] = 0.2
    """α, the relative increase of the advantage of planning tokens."""
    grams: tuple[Annotated[Ids, Field(min_length=1)], ...] = ()
    """Strategic grams, each a list of token ids (`rlhf trajectories RUN --tokens` shows ids)."""
    plan_start_ids: Ids = ()
    """Token ids of the tag that opens a plan; the tag itself is no planning token."""
    plan_end_ids: Ids = ()
    """Token ids of the tag that closes it."""

    def __post_init__(self) -> None:
        if not self.grams and not self.plan_start_ids:
            raise ValueError("hicra needs to know planning tokens: give grams, or plan_start_ids and plan_end_ids")
        if self.plan_end_ids and not self.plan_start_ids:
            raise ValueError("plan_end_ids has no effect without plan_start_ids; give both, or remove it")

    def check_policy(self, tokenizer: Any) -> None:
        """Refuse ids that the policy cannot say. Raises RecipeError."""
        n_vocab = len(tokenizer)
        for name, ids in (
            ("grams", [i for gram in self.grams for i in gram]),
            ("plan_start_ids", self.plan_start_ids),
            ("plan_end_ids", self.plan_end_ids),
        ):
            strange = [i for i in ids if not 0 <= i < n_vocab]
            if strange:
                raise RecipeError(
                    "the policy has no such token, so this key has no effect",
                    where=f"advantage hicra, {name}",
                    got=str(strange[0]),
                    expected=f"ids from 0 to {n_vocab - 1}",
                    hint="list ids of this policy's tokenizer: `rlhf trajectories RUN --tokens` shows them",
                )

    def changed(self, groups: Sequence[ScoredGroup], credits: Sequence[Credit]) -> list[Credit]:
        """Return `credits` with planning tokens raised."""
        changed, n_planning = [], 0
        for group, credit in zip(groups, credits, strict=True):
            trajectories = []
            for trajectory, rows in zip(group.trajectories, credit.advantages_GNT, strict=True):
                masks = self._masks(trajectory)
                n_planning += sum(map(sum, masks))
                trajectories.append(tuple(map(self._raised, rows, masks)))
            changed.append(replace(credit, advantages_GNT=tuple(trajectories)))
        return with_counters(changed, {"credit/n_planning_tokens": float(n_planning)})

    def _masks(self, trajectory: Trajectory) -> list[list[bool]]:
        """Return `[N][T]`, the planning tokens of all generations: those of whole calls, cut where their pieces end."""
        generations = trajectory.generations
        masks = []
        for numbers in call_numbers(trajectory):
            found = iter(self.planning([i for n in numbers for i in generations[n].token_ids]))
            masks += [list(islice(found, generations[n].n_tokens)) for n in numbers]
        return masks

    def planning(self, ids: Sequence[int]) -> list[bool]:
        """Return `[T]`, whether each token of a call is a planning token."""
        found = [False] * len(ids)
        for gram in self.grams:
            for start in _places(ids, gram):
                found[start : start + len(gram)] = [True] * len(gram)
        position = 0
        while self.plan_start_ids and (opening := next(_places(ids, self.plan_start_ids, position), None)) is not None:
            start = opening + len(self.plan_start_ids)
            closing = next(_places(ids, self.plan_end_ids, start), len(ids)) if self.plan_end_ids else len(ids)
            found[start:closing] = [True] * (closing - start)
            position = closing + len(self.plan_end_ids)
        return found

    def _raised(self, row: Sequence[float], planning: Sequence[bool]) -> tuple[float, ...]:
        return tuple(a + self.alpha * abs(a) if plans else a for a, plans in zip(row, planning, strict=True))


def _places(ids: Sequence[int], wanted: Ids, first: int = 0) -> Iterator[int]:
    """Yield every position from `first` on where `wanted` occurs in `ids`."""
    ids = tuple(ids)
    position = first - 1
    # `index` finds candidates at the speed of C: most ids begin nothing.
    with suppress(ValueError):
        while True:
            position = ids.index(wanted[0], position + 1)
            if ids[position : position + len(wanted)] == wanted:
                yield position
