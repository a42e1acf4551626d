"""Attempts as rows of plain values, read from an evaluation's files alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.data import Finish, Outcome
from rlhf.evaluation.store import list_steps, read_columns

_COLUMNS = [
    *("stage", "task_id", "attempt", "outcome", "is_failure", "solved", "opening", "duration_s", "n_retries"),
    *("n_turns", "n_given", "n_tokens", "generations", "turns", "score", "spent"),
]


@dataclass(frozen=True, slots=True)
class Attempt:
    """Attempt at a task.

    Attributes:
        part: of the suite; the stage, for the evaluation of a run.
        task_id: the task attempted.
        number: of the attempt at this task, from 0.
        outcome: how it ended.
        score: weighted sum of the rewards; None for an infrastructure error.
        n_turns: actions of the policy.
        n_candidates: attempts that it was chosen from by a strategy; 1 where it is the only one.
        any_solved: whether one of them was solved.
        n_spent_turns: actions of the policy in all of them; None where it is the only one. Tokens are always those of
            all of them.
        n_invalid: of these, not understood.
        n_tokens: sampled.
        n_prompt_tokens: read, all prompts together, as a provider counts them.
        n_replies: generations of the policy.
        n_cut_replies: of these, cut before they ended, at `limits.max_tokens` or the end of the context.
        n_empty_replies: turns in which the policy replied with no text and no call of a tool.
        was_cut: whether its last reply reached `limits.max_tokens` and could not be read as an action.
        is_counted: whether a server counted these tokens, for each reply of the attempt.
        seconds: of wall-clock time.
        n_retries: attempts that were thrown away before it because a part failed.
        opening: hash of what the environment said first; empty for an infrastructure error.
    """

    part: str
    task_id: str
    number: int
    outcome: Outcome
    score: float | None = None
    n_turns: int = 0
    n_invalid: int = 0
    n_tokens: int = 0
    n_prompt_tokens: int = 0
    n_replies: int = 0
    n_cut_replies: int = 0
    n_empty_replies: int = 0
    was_cut: bool = False
    is_counted: bool = False
    seconds: float = 0.0
    n_retries: int = 0
    opening: str = ""
    n_candidates: int = 1
    any_solved: bool = False
    n_spent_turns: int | None = None
    rewards: tuple[tuple[str, float], ...] = ()

    @property
    def solved(self) -> bool:
        """True if the environment's own success criterion was met."""
        return self.outcome is Outcome.SOLVED

    @property
    def is_error(self) -> bool:
        """True if a part failed, so that the attempt says nothing about the policy."""
        return self.outcome.is_infrastructure_error

    @property
    def type(self) -> str:
        """Type of the task: its id without the part after the last slash (environment, game, level, split)."""
        return self.task_id.rpartition("/")[0] or self.task_id


def read_attempts(folder: Path, *, stage: str | None = None) -> list[Attempt]:
    """Read the attempts of all evaluations in a folder of trajectories, or of one of its stages.

    Raises:
        DataError: a file cannot be read.
    """
    stored = [s for s in list_steps(folder) if s.phase == "eval" and stage in (None, s.stage)]
    return [_attempt(row) for one in stored for row in read_columns(one.path, _COLUMNS)]


def evaluations_in(folder: Path) -> list[str]:
    """Names of the evaluations in a trajectory folder, in order of their steps."""
    steps = {s.stage: s.step for s in list_steps(folder) if s.phase == "eval"}
    return sorted(steps, key=lambda stage: (steps[stage], stage != "before", stage))


def solved_by_task(attempts: Iterable[Attempt]) -> dict[str, list[bool]]:
    """Task -> whether each attempt was solved, failures of parts left out."""
    found: dict[str, list[bool]] = {}
    for a in attempts:
        if not a.is_error:
            found.setdefault(a.task_id, []).append(a.solved)
    return found


def scores_by_task(attempts: Iterable[Attempt]) -> dict[str, list[float]]:
    """Task -> score of each attempt, failures of parts left out."""
    found: dict[str, list[float]] = {}
    for a in attempts:
        if a.score is not None and not a.is_error:
            found.setdefault(a.task_id, []).append(a.score)
    return found


def openings(attempts: Iterable[Attempt]) -> dict[str, set[str]]:
    """Task -> hashes of what its environment said first: one, unless the environment is not deterministic."""
    found: dict[str, set[str]] = {}
    for a in attempts:
        if a.opening:
            found.setdefault(a.task_id, set()).add(a.opening)
    return found


def digest(parts: Iterable[str], n: int = 16) -> str:
    """Return the first `n` hexadecimal digits of the SHA-256 of `parts`, in their order."""
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hashed.update(len(data).to_bytes(8, "big") + data)
    return hashed.hexdigest()[:n]


def _attempt(row: dict[str, Any]) -> Attempt:
    if row["is_failure"]:
        return Attempt(row["stage"], row["task_id"], row["attempt"], Outcome(row["outcome"]))
    given = row["n_given"] or 0
    own = _own_tokens(row)
    spent = row["spent"] or {"n_candidates": 1, "n_solved": row["solved"], "n_turns": None, **own}
    return Attempt(
        part=row["stage"],
        task_id=row["task_id"],
        number=row["attempt"],
        outcome=Outcome(row["outcome"]),
        score=row["score"] and row["score"]["total"],
        rewards=tuple((part["name"], part["value"]) for part in row["score"]["parts"]) if row["score"] else (),
        n_turns=row["n_turns"] - given,
        n_invalid=sum(not turn["valid"] for turn in row["turns"][given:]),
        n_tokens=spent["n_tokens"],
        n_prompt_tokens=spent["n_prompt_tokens"],
        n_replies=len(row["generations"]),
        n_cut_replies=sum(g["finish"] == Finish.LENGTH for g in row["generations"]),
        n_empty_replies=_n_empty(row),
        was_cut=_was_cut(row),
        is_counted=spent["is_counted"],
        seconds=row["duration_s"],
        n_retries=row["n_retries"],
        opening=digest([row["opening"]]),
        n_candidates=spent["n_candidates"],
        any_solved=bool(spent["n_solved"]),
        n_spent_turns=spent["n_turns"],
    )


def _was_cut(row: dict[str, Any]) -> bool:
    """True if the last turn has an error and its reply was cut at the token limit."""
    if not row["turns"] or not row["generations"] or row["turns"][-1]["error"] is None:
        return False
    return bool(row["generations"][-1]["finish"] == Finish.LENGTH)


def _n_empty(row: dict[str, Any]) -> int:
    """Number of turns whose reply, where it was to be an action, holds nothing but blanks."""
    generations = iter(row["generations"])
    calls = [[next(generations) for _ in range(turn["n_generations"])] for turn in row["turns"]]
    asked = [turn for turn, made in zip(row["turns"], calls, strict=True) if made and not made[-1].get("role")]
    return sum(not f"{turn['text']}{turn.get('said') or ''}".strip() for turn in asked)


def _own_tokens(row: dict[str, Any]) -> dict[str, Any]:
    """Tokens of the attempt itself."""
    counted = [g.get("usage") for g in row["generations"]]
    is_counted = bool(counted) and all(counted)
    return {
        "n_tokens": sum(usage[1] for usage in counted) if is_counted else row["n_tokens"],
        "n_prompt_tokens": sum(u[0] for u in counted) if is_counted else sum(_prompt_lengths(row["generations"])),
        "is_counted": is_counted,
    }


def _prompt_lengths(generations: Sequence[dict[str, Any]]) -> Iterator[int]:
    before = 0
    for g in generations:
        length = len(g["prompt_ids"]) + (before if g["extends"] else 0)
        yield length
        before = length + len(g["token_ids"])
