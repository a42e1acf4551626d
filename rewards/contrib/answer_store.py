"""Bounded store of right and wrong answers by query, and the score of a new answer against it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewards.models.embedding import Vector, embedded

Vectors = NDArray[np.float32]


def exploit(answer: Vector, successes_ND: Vectors) -> float:
    """−‖a − mean of the successes‖₂: 0 at their middle, less the further away.

    a = (1, 0), successes (.8, .6) and (1, 0): their mean is (.9, .3), so −√(.01 + .09) = −.316228.

    Args:
        answer: `[D]`.
        successes_ND: `[N, D]`, at least one.
    """
    return -float(np.linalg.norm(answer - successes_ND.mean(axis=0)))


def explore(answer: Vector, failures_ND: Vectors) -> float:
    """Novelty 1 − the largest cosine with a failure: 0 for a repeated failure, 1 for an orthogonal answer.

    a = (1, 0), failures (0, 1) and (.6, .8): 1 − .6 = .4.

    Args:
        answer: `[D]`, of length 1.
        failures_ND: `[N, D]`, at least one, each of length 1.
    """
    return 1.0 - float((failures_ND @ answer).max())


def normalised(value: float | None, window: Sequence[float]) -> float:
    """Min-max normalised value (x − min) / (max − min) of a window, in [0, 1]; 0 without a value or spread.

    .4 in a window from .1 to .9 is .375.
    """
    low, high = min(window, default=0.0), max(window, default=0.0)
    if value is None or low == high:
        return 0.0
    return min(max((value - low) / (high - low), 0.0), 1.0)


class AnswerBuffer:
    """Bounded queries with answer vectors; the least recently answered query is evicted first.

    Args:
        per_query: answers that are kept of a query, the newest.
        capacity: answers that are kept in all, at least `per_query`.
        dim: length of each vector.
    """

    def __init__(self, per_query: int, capacity: int, dim: int) -> None:
        self.per_query, self.capacity, self.dim = per_query, capacity, dim
        self.n = 0
        self._kept: dict[str, tuple[Vector, list[Vector]]] = {}
        self._queries: Vectors | None = None

    def add(self, query: str, answer: Vector) -> None:
        """Keep an answer to a query."""
        key = hashlib.blake2b(query.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        vector, answers = self._kept.pop(key, (embedded(query, self.dim), []))
        answers.append(answer)
        self._kept[key] = vector, answers[-self.per_query :]
        self.n += 1 - (len(answers) > self.per_query)
        while self.n > self.capacity:
            self.n -= len(self._kept.pop(next(iter(self._kept)))[1])
        self._queries = None

    def near(self, query: str, k: int) -> Vectors:
        """Answers `[N, D]` of the `k` nearest queries by cosine, older ones first on ties."""
        if not self._kept:
            return np.zeros((0, self.dim), np.float32)
        if self._queries is None:
            self._queries = np.stack([vector for vector, _ in self._kept.values()])
        nearest = np.argsort(-(self._queries @ embedded(query, self.dim)), kind="stable")[:k]
        answers = [answers for _, answers in self._kept.values()]
        return np.stack([answer for i in nearest for answer in answers[i]])

    def state_dict(self) -> dict[str, Any]:
        """Everything it holds, as two tensors and the keys that say what belongs together."""
        import torch

        queries = [vector for vector, _ in self._kept.values()]
        answers = [answer for _, answers in self._kept.values() for answer in answers]
        return {
            "keys": list(self._kept),
            "counts": [len(answers) for _, answers in self._kept.values()],
            "queries": torch.from_numpy(np.array(queries, np.float32).reshape(-1, self.dim)),
            "answers": torch.from_numpy(np.array(answers, np.float32).reshape(-1, self.dim)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        queries, answers = state["queries"].numpy(), list(state["answers"].numpy())
        self._kept, self._queries, self.n = {}, None, 0
        for key, vector, count in zip(state["keys"], queries, state["counts"], strict=True):
            self._kept[key] = vector, answers[self.n : self.n + count]
            self.n += count
