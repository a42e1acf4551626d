"""Records of attempts, and the rows of a Parquet table that they become.

A prompt that extends the generation before it becomes its new tokens only; everything comes back exactly as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from rlhf.data import Action, Failure, Finish, Generation, Outcome, Prompt, Score, Trajectory, Turn, Verdict
from rlhf.data.generation import Conversations
from rlhf.data.tokens import packed_ids
from rlhf.errors import DataError
from rlhf.evaluation.answers import SamplingCost

Phase = Literal["train", "eval"]
Figures = tuple[tuple[float, ...], ...]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    """A trajectory with what later stages added to it.

    Attributes:
        step: optimiser step it was made in.
        stage: stage of the recipe.
        phase: `train` or `eval`.
        task_id: the task attempted.
        trajectory: the record of the episode.
        score: its reward parts; None if it was not scored.
        advantages: `[N][T]`: generation, sampled token; None if no credit was computed.
        spent: what the candidates took that it was chosen from; None where nothing was chosen.
        entropies: `[N][T]` of the trainer's distribution at each sampled token, nats; None if the step measured none,
            NaN where it does not train on a token.
        gaps: `[N][T]` the trainer's log-prob less the sampler's, likewise.
    """

    step: int
    stage: str
    phase: str
    task_id: str
    trajectory: Trajectory
    score: Score | None = None
    advantages: Figures | None = None
    spent: SamplingCost | None = None
    entropies: Figures | None = None
    gaps: Figures | None = None

    def __post_init__(self) -> None:
        shape = [g.n_tokens for g in self.trajectory.generations]
        for name in ("advantages", "entropies", "gaps"):
            figures = getattr(self, name)
            got = shape if figures is None else [len(row) for row in figures]
            if got != shape:
                message = f"{name} do not match the tokens"
                raise DataError(message, where=self.task_id, got=str(got), expected=str(shape))


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """An attempt that ended with an infrastructure error.

    Attributes:
        step: optimiser step it was made in.
        stage: stage of the recipe.
        phase: `train` or `eval`.
        task_id: the task attempted.
        failure: what failed.
    """

    step: int
    stage: str
    phase: str
    task_id: str
    failure: Failure


#: Figures to look at: three digits in any range, stored as float32, which every reader knows.
_SHORT = pa.list_(pa.list_(pa.float32()))
_IDS, _FLOATS = pa.list_(pa.int32()), pa.list_(pa.float64())
_TURN = pa.struct(
    {
        "text": pa.string(),
        "error": pa.string(),
        "reply": pa.string(),
        "reward": pa.float64(),
        "state_key": pa.string(),
        "valid": pa.bool_(),
        "n_generations": pa.int32(),
        "notes": pa.map_(pa.string(), pa.string()),
        "parts": pa.list_(pa.string()),
        "said": pa.string(),
        "duration_s": pa.float64(),
    }
)
_GENERATION = pa.struct(
    {
        "extends": pa.bool_(),  # the prompt is the generation before, whole, then `prompt_ids`
        "prompt_ids": _IDS,
        "stop_ids": _IDS,
        "adapter": pa.string(),  # role whose adapter read the prompt; empty for the shared one
        "token_ids": _IDS,
        "logprobs": _FLOATS,
        "finish": pa.string(),
        "role": pa.string(),
        "by": pa.string(),  # who sampled it in the place of the policy; empty for the policy
        "usage": pa.list_(pa.int64()),  # tokens read and sampled, as a server counted them
        "policy_version": pa.int64(),
        "version_spans": pa.list_(pa.list_(pa.int64())),  # (version, number of tokens); empty if there is one version
    }
)
_PART = pa.struct({"name": pa.string(), "value": pa.float64(), "why": pa.string(), "per_turn": _FLOATS})
_SPENT = pa.struct(
    {
        "chosen": pa.int64(),
        "why": pa.string(),
        **dict.fromkeys(("n_candidates", "n_solved", "n_turns", "n_tokens", "n_prompt_tokens"), pa.int64()),
        "is_counted": pa.bool_(),
    }
)
_COLUMNS: dict[str, Any] = {
    "step": pa.int64(),
    "stage": pa.string(),
    "phase": pa.string(),
    "task_id": pa.string(),
    "attempt": pa.int64(),
    "outcome": pa.string(),
    "is_failure": pa.bool_(),
    "retryable": pa.bool_(),
    "solved": pa.bool_(),
    "n_turns": pa.int64(),
    "n_tokens": pa.int64(),
    "detail": pa.string(),
    "duration_s": pa.float64(),
    "n_retries": pa.int64(),
    "n_given": pa.int64(),
    "parent": pa.int64(),
    "n_shared": pa.int64(),
    "opening": pa.string(),
    "turns": pa.list_(_TURN),
    "generations": pa.list_(_GENERATION),
    "score": pa.struct({"parts": pa.list_(_PART), "turns": _FLOATS, "total": pa.float64(), "watched": pa.list_(_PART)}),
    "advantages": pa.list_(_FLOATS),
    "spent": _SPENT,
    "entropies": _SHORT,
    "gaps": _SHORT,
}
#: Marks the files of this store and their version.
FORMAT = {b"rlhf.trajectories": b"1"}
SCHEMA = pa.schema(_COLUMNS, metadata=FORMAT)


def encode(record: TrajectoryRecord) -> Row:
    """Return the row of a trajectory."""
    t = record.trajectory
    return {
        "step": record.step,
        "stage": record.stage,
        "phase": record.phase,
        "task_id": _text(record.task_id),
        "attempt": t.attempt,
        "outcome": str(t.outcome),
        "is_failure": False,
        "solved": t.solved,
        "n_turns": len(t.turns),
        "n_tokens": t.n_tokens,
        "detail": _text(t.detail),
        "duration_s": t.duration_s,
        "n_retries": t.n_retries,
        "n_given": t.n_given,
        "parent": t.parent,
        "n_shared": t.n_shared,
        "opening": _text(t.opening),
        "turns": [_encode_turn(turn) for turn in t.turns],
        "generations": _encode_generations(t.generations),
        "score": _encode_score(record.score) if record.score is not None else None,
        "advantages": record.advantages,
        "spent": None if record.spent is None else {**asdict(record.spent), "why": _text(record.spent.why)},
        "entropies": _short(record.entropies),
        "gaps": _short(record.gaps),
    }


def encode_failure(record: FailureRecord) -> Row:
    """Return the row of an attempt that ended with an infrastructure error."""
    failure, names = record.failure, (record.step, record.stage, record.phase, record.task_id)
    played = {} if failure.trajectory is None else encode(TrajectoryRecord(*names, failure.trajectory))
    return {
        **played,
        "step": record.step,
        "stage": record.stage,
        "phase": record.phase,
        "task_id": _text(record.task_id),
        "attempt": failure.attempt,
        "outcome": str(failure.outcome),
        "detail": _text(failure.message),
        "is_failure": True,
        "retryable": failure.retryable,
        "solved": False,
    }


def decode_failure(row: Row) -> FailureRecord:
    """Return the record that `encode_failure` was given."""
    played = None if row.get("turns") is None else decode(row).trajectory
    failure = Failure(row["attempt"], Outcome(row["outcome"]), row["detail"], row["retryable"], played)
    return FailureRecord(row["step"], row["stage"], row["phase"], row["task_id"], failure)


def _encode_turn(turn: Turn) -> Row:
    return {
        "text": _text(turn.action.text),
        "error": _text(turn.action.error),
        "reply": _text(turn.reply),
        "reward": turn.reward,
        "state_key": _text(turn.state_key),
        "valid": turn.valid,
        "n_generations": len(turn.generations),
        "notes": [(_text(name), _text(note)) for name, note in turn.action.notes.items()],
        "parts": [_text(part) for part in turn.action.parts],
        "said": _text(turn.action.reply_text),
        "duration_s": turn.duration_s,
    }


def _encode_generations(generations: Sequence[Generation]) -> list[Row]:
    rows: list[Row] = []
    before: Generation | None = None
    for g in generations:
        extends = before is not None and g.prompt.extends(before)
        n_known = before.length if before is not None and extends else 0
        rows.append(
            {
                "extends": extends,
                "prompt_ids": g.prompt.ids[n_known:].tolist(),
                "stop_ids": g.prompt.stop_ids,
                "adapter": g.prompt.adapter,
                "token_ids": g.ids.tolist(),
                "logprobs": g.logps.tolist(),
                "finish": str(g.finish),
                "role": _text(g.role),
                "by": _text(g.opponent),
                "usage": g.usage,
                "policy_version": g.policy_version,
                "version_spans": g.version_spans,
            }
        )
        before = g
    return rows


def _encode_score(score: Score) -> Row:
    parts, watched = (
        [
            {"name": _text(name), "value": verdict.value, "why": _text(verdict.why), "per_turn": verdict.per_turn}
            for name, verdict in verdicts.items()
        ]
        for verdicts in (score.parts, score.monitored)
    )
    return {"parts": parts, "turns": score.turns, "total": score.total, "watched": watched}


def decode(row: Row) -> TrajectoryRecord:
    """Return the record that `encode` was given."""
    trajectory = Trajectory(
        task_id=row["task_id"],
        attempt=row["attempt"],
        opening=row["opening"],
        turns=_decode_turns(row["turns"], _decode_generations(row["generations"])),
        outcome=Outcome(row["outcome"]),
        detail=row["detail"],
        duration_s=row["duration_s"],
        n_retries=row["n_retries"],
        n_given=row.get("n_given", 0),  # these three are not in the files of older versions
        parent=row.get("parent"),
        n_shared=row.get("n_shared", 0),
    )
    advantages = None if row["advantages"] is None else tuple(map(tuple, row["advantages"]))
    score = None if row["score"] is None else _decode_score(row["score"])
    # These three are not in the files of older versions.
    spent = SamplingCost(**row["spent"]) if row.get("spent") else None
    entropies, gaps = (tuple(map(tuple, row[name])) if row.get(name) else None for name in ("entropies", "gaps"))
    names = (row["step"], row["stage"], row["phase"], row["task_id"])
    return TrajectoryRecord(*names, trajectory, score, advantages, spent, entropies, gaps)


def _decode_turns(turns: list[Row], generations: Iterator[Generation]) -> tuple[Turn, ...]:
    return tuple(
        Turn(
            action=Action(
                t["text"],
                tuple(next(generations) for _ in range(t["n_generations"])),
                t["error"],
                dict(t.get("notes") or ()),  # these three are not in the files of older versions
                tuple(t.get("parts") or ()),
                t.get("said") or "",
            ),
            reply=t["reply"],
            reward=t["reward"],
            state_key=t["state_key"],
            valid=t["valid"],
            duration_s=t.get("duration_s") or 0.0,
        )
        for t in turns
    )


def _decode_generations(rows: list[Row]) -> Iterator[Generation]:
    before, conversations = packed_ids(()), Conversations()
    for row in rows:
        prompt, sampled = packed_ids(row["prompt_ids"]), packed_ids(row["token_ids"])
        if row["extends"]:
            prompt = before + prompt
        before = prompt + sampled
        generation = Generation(
            prompt=Prompt(prompt, tuple(row["stop_ids"]), row.get("adapter") or ""),
            token_ids=sampled,
            logprobs=tuple(row["logprobs"]),
            finish=Finish(row["finish"]),
            policy_version=row["policy_version"],
            version_spans=tuple((version, n) for version, n in row["version_spans"]),
            usage=(row["usage"][0], row["usage"][1]) if row.get("usage") else None,
        )
        yield conversations.keep(generation, role=row.get("role") or "", opponent=row.get("by") or "")


def _decode_score(row: Row) -> Score:
    parts, watched = (
        {
            one["name"]: Verdict(one["value"], one["why"], None if one["per_turn"] is None else tuple(one["per_turn"]))
            for one in ones or ()
        }
        for ones in (row["parts"], row.get("watched"))  # which is not in the files of older versions
    )
    return Score(parts, tuple(row["turns"]), row["total"], watched)


def _short(figures: Figures | None) -> list[Any] | None:
    """Half precision: what is left of a float32 compresses to half its size."""
    if figures is None:
        return None
    return [np.asarray(row, np.float32).astype(np.float16).astype(np.float32) for row in figures]


def _text(text: str | None) -> str | None:
    """UTF-8 has no lone surrogates: text that holds one is kept with the surrogate written out."""
    try:
        return None if text is None else text.encode().decode()
    except UnicodeEncodeError:
        return str(text).encode("utf-8", "backslashreplace").decode()
