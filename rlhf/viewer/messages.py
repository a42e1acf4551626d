"""Stored attempts as conversations: what other tools' formats are made of, redacted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlhf.data import Outcome, Trajectory
from rlhf.evaluation.rows import TrajectoryRecord, decode, decode_failure
from rlhf.evaluation.store import StoredStep
from rlhf.viewer.attempts import Attempts
from rlhf.viewer.redaction import Redaction


@dataclass(frozen=True, slots=True)
class Conversation:
    """One attempt as messages.

    Attributes:
        task_id: the task attempted.
        attempt: number of it.
        outcome: how it ended.
        detail: what there is to say of that.
        messages: `role` and `content` each, in turns; the environment is the user.
        parts: value and reason of each reward.
        facts: plain figures of it.
    """

    task_id: str
    attempt: int
    outcome: Outcome
    detail: str
    messages: list[dict[str, str]]
    parts: dict[str, dict[str, Any]]
    facts: dict[str, Any]


def conversations(attempts: Attempts, stored: StoredStep, redaction: Redaction) -> Iterator[Conversation]:
    """The attempts of a step, one at a time.

    Raises:
        DataError: the file cannot be read.
    """
    for row in attempts.records(stored):
        if row["is_failure"]:
            failed = decode_failure(row)
            failure, text = failed.failure, redaction.text
            yield Conversation(
                text(failed.task_id), failure.attempt, failure.outcome, text(failure.message), [], {}, {}
            )
        else:
            yield _conversation(decode(row), redaction)


def _conversation(record: TrajectoryRecord, redaction: Redaction) -> Conversation:
    t, score = record.trajectory, record.score
    parts = {} if score is None else {**score.parts, **score.watched}
    plain: dict[str, Any] = redaction.values(
        {
            "task_id": record.task_id,
            "detail": t.detail,
            "messages": list(_messages(t)),
            "parts": {name: {"value": verdict.value, "why": verdict.why} for name, verdict in parts.items()},
            "facts": {
                "score": None if score is None else score.total,
                "rewards": list(score.turns) if score is not None else [turn.reward for turn in t.turns],
                "n_turns": len(t.turns),
                "n_tokens": t.n_tokens,
                "n_read": sum(g.prompt.n_tokens for g in t.generations),
                "n_context": max((g.prompt.n_tokens + g.n_tokens for g in t.generations), default=0),
                "seconds": t.duration_s,
                "versions": sorted({v for g in t.generations for v in g.versions}),
                "parent": t.parent,
                "notes": [dict(turn.action.notes) for turn in t.turns],
            },
        }
    )
    return Conversation(attempt=t.attempt, outcome=t.outcome, **plain)


def _messages(t: Trajectory) -> Iterator[dict[str, str]]:
    yield {"role": "user", "content": t.opening}
    for turn in t.turns:
        yield {"role": "assistant", "content": turn.action.said or turn.action.text}
        if turn.reply or turn is not t.turns[-1]:  # many environments end with an empty observation
            yield {"role": "user", "content": turn.reply}
