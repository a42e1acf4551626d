"""Attempts at earlier tasks as cases, and a retriever that learns which of them help.

Source: Memento (AgentFly), arXiv 2508.16153. There the retriever is an encoder fine-tuned on pairs; here it is a
logistic regression over what a task and a case have in common, small enough to learn in a run and to lie in the store.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import History
from agents.stores.asking import actions_of, by_task
from agents.stores.entry import Entry, Origin
from agents.stores.kind import Recollection, recalled
from agents.stores.search import in_common
from agents.stores.store import Store
from rlhf.data import ScoredGroup, Trajectory
from rlhf.settings import STRICT
from rlhf.stats import sigmoid

_CASE, _WEIGHTS, _N_STEPS = "case", "weights", "steps"
#: Before anything is learnt the case with most words in common comes first, a solved one before one that is not.
_FIRST = (0.0, 4.0, 0.5, 0.0)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Cases:
    """Case memory: shows similar cases with the highest learnt values, solved ones apart.

    A case is a task's opening, what was done, and whether that solved it. Of each task at most two are kept: the
    shortest solution, and the newest failure. Q(s, c) = σ(w · x(s, c)) is how likely an attempt at task s succeeds when
    it is shown case c; x has the share of words in common, whether the case was solved, and their product. w is learnt
    by a step down the gradient of the cross-entropy for every case that an attempt was shown. Cases are chosen by
    μ(c | s) ∝ exp(Q(s, c) / α), without putting back, and by the highest Q where α is 0.
    """

    k: Annotated[int, Field(ge=1)] = 4
    """Most cases that are shown."""
    alpha: Annotated[float, Field(ge=0)] = 0.0
    """α of the choice: the higher, the more other cases than the best are tried. The draw is the task's own: all
    attempts of a step at it are shown the same."""
    lr: Annotated[float, Field(ge=0)] = 0.1
    """Learning rate of w; 0 keeps the order by words in common."""
    include_same_task: bool = False
    """Include cases of the same task. A test task never has any."""
    max_cases: Annotated[int, Field(ge=2)] = 1000
    """Most cases; of more the oldest go."""
    max_chars: Annotated[int, Field(ge=1)] = 200
    """Characters that are shown of a case's opening, and of its actions."""

    def recollect(self, store: Store, history: History) -> Recollection:
        """Choose cases for a task that begins."""
        known = [c for c in store.entries(_CASE) if self.include_same_task or c.origin.task != history.task.id]
        if not known:
            return Recollection()
        weights = weights_of(store)
        values = [value_of(weights, features(history.opening, case)) for case in known]
        seed = f"{history.task.id}/{store.kept(_N_STEPS) or 0}"
        chosen = [known[i] for i in choose(values, self.k, self.alpha, seed)]
        lines = []
        for is_solved, title in ((True, "Solved before:"), (False, "Not solved before:")):
            of_kind = [case for case in chosen if case.fields["solved"] is is_solved]
            lines += [title, *map(self._told, of_kind)] if of_kind else []
        return Recollection("\n".join(lines), tuple(case.id for case in chosen))

    def learn(self, store: Store, groups: Sequence[ScoredGroup], split: str) -> Mapping[str, float]:
        """Learn from what attempts were shown and came to, then keep them as cases."""
        weights, losses, known = weights_of(store), [], {case.id: case for case in store.entries(_CASE)}
        for trajectory in (t for group in groups for t in group.trajectories):
            for case in (known[n] for n in recalled(trajectory).entries if n in known):
                x = features(trajectory.opening, case)
                losses.append(cross_entropy(weights, x, trajectory.solved))
                weights = learnt(weights, x, trajectory.solved, self.lr)
        if losses:
            store.keep(_WEIGHTS, json.dumps(weights))
        of_task = {(case.origin.task, case.fields["solved"]): case for case in known.values()}
        for attempts in by_task(groups).values():
            _keep(store, of_task, [t for t in attempts if t.turns], split)
        store.keep_newest(_CASE, self.max_cases)
        store.keep(_N_STEPS, str(int(store.kept(_N_STEPS) or 0) + 1))
        figures = {"store/n_entries": float(store.n_entries()), "store/n_recalled": float(len(losses))}
        return figures | ({"store/retriever_loss": sum(losses) / len(losses)} if losses else {})

    def _told(self, case: Entry) -> str:
        opening = " ".join(case.text.split())[: self.max_chars]
        return f"{opening}\n> {', '.join(case.fields['actions'])[: self.max_chars]}"


def features(query: str, case: Entry) -> tuple[float, ...]:
    """Features x(s, c): 1, word overlap |A ∩ B| / |A ∪ B|, 1 if the case was solved, and their product."""
    common = in_common(query, case.text)
    solved = 1.0 if case.fields["solved"] else 0.0
    return (1.0, common, solved, common * solved)


def value_of(weights: Sequence[float], x: Sequence[float]) -> float:
    """Q = σ(w · x)."""
    return sigmoid(sum(w * v for w, v in zip(weights, x, strict=True)))


def cross_entropy(weights: Sequence[float], x: Sequence[float], solved: bool) -> float:
    """−log of the probability that Q gives to what came about, in nats."""
    z = sum(w * v for w, v in zip(weights, x, strict=True)) * (1 if solved else -1)
    return max(-z, 0.0) + math.log1p(math.exp(-abs(z)))


def learnt(weights: Sequence[float], x: Sequence[float], solved: bool, lr: float) -> tuple[float, ...]:
    """Weights after a gradient step on the cross-entropy: w + lr (y − Q) x."""
    error = (1.0 if solved else 0.0) - value_of(weights, x)
    return tuple(w + lr * error * v for w, v in zip(weights, x, strict=True))


def chances(values: Sequence[float], alpha: float) -> list[float]:
    """μ ∝ exp(Q / α), for α > 0. Q = (.9, .5, .1) with α = .1 gives (.981690, .017980, .000329)."""
    top = max(values)
    parts = [math.exp((value - top) / alpha) for value in values]
    return [part / sum(parts) for part in parts]


def choose(values: Sequence[float], k: int, alpha: float, seed: str) -> list[int]:
    """Indices of `k` values: the highest, later ones first on ties, or sampled by `chances`."""
    left = sorted(range(len(values)), key=lambda i: (-values[i], -i))
    if alpha == 0:
        return left[:k]
    rng = random.Random(seed)
    drawn: list[int] = []
    while left and len(drawn) < k:
        [picked] = rng.choices(left, weights=chances([values[i] for i in left], alpha))
        drawn.append(picked)
        left.remove(picked)
    return drawn


def weights_of(store: Store) -> tuple[float, ...]:
    """The weights as they are in a store."""
    found = store.kept(_WEIGHTS)
    return tuple(json.loads(found)) if found else _FIRST


def _keep(store: Store, of_task: Mapping[tuple[str, bool], Entry], attempts: Sequence[Trajectory], split: str) -> None:
    """Keep the shortest solution of a task and its newest failure; `of_task` are the stored ones."""
    for is_solved in (True, False):
        of_kind = [t for t in attempts if t.solved is is_solved]
        if not of_kind:
            continue
        chosen = min(of_kind, key=lambda t: len(t.turns)) if is_solved else of_kind[-1]
        actions = actions_of(chosen)
        fields, before = {"solved": is_solved, "actions": actions}, of_task.get((chosen.task_id, is_solved))
        if before is None:
            store.add(_CASE, chosen.opening, Origin(chosen.task_id, split), fields)
        elif not is_solved or len(actions) < len(before.fields["actions"]):
            store.update(before.id, chosen.opening, fields)
