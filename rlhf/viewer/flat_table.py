"""Attempts as one Parquet table of plain columns: a row an attempt, with its messages and rewards.

    import pandas
    pandas.read_parquet("attempts.parquet").groupby("step").solved.mean()

Tokens stay in the run's own `trajectories/`, which are Parquet too: their ids would tell a text that is blacked out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.data import Outcome, Task
from rlhf.viewer.library import ShownRun
from rlhf.viewer.messages import conversations
from rlhf.viewer.redaction import Redaction

_MESSAGE = pa.struct({"role": pa.string(), "content": pa.string()})
SCHEMA = pa.schema(
    {
        "run": pa.string(),
        "stage": pa.string(),
        "phase": pa.string(),
        "step": pa.int64(),
        "task_id": pa.string(),
        "attempt": pa.int64(),
        "outcome": pa.string(),
        "solved": pa.bool_(),
        "is_failure": pa.bool_(),
        "detail": pa.string(),
        "score": pa.float64(),
        "parts": pa.map_(pa.string(), pa.float64()),
        "why": pa.map_(pa.string(), pa.string()),
        "rewards": pa.list_(pa.float64()),
        "messages": pa.list_(_MESSAGE),
        "end": pa.string(),
        "finish": pa.string(),
        "reference": pa.string(),
        "columns": pa.string(),
        "n_turns": pa.int64(),
        "n_tokens": pa.int64(),
        "seconds": pa.float64(),
        "versions": pa.list_(pa.int64()),
    }
)


def write_table(run: ShownRun, path: Path, redaction: Redaction, task_of: Callable[[str], Task | None]) -> int:
    """Write all attempts of a run, a step at a time; returns how many.

    Args:
        run: whose attempts.
        path: of the table.
        redaction: of every text.
        task_of: task of an attempt by its id, for its reference and the columns of its row; None where it is unknown.

    Raises:
        DataError: attempts cannot be read.
        OSError: the table cannot be written.
    """
    n = 0
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for stored in run.attempts.steps():
            place = {"run": run.id, "stage": stored.stage, "phase": stored.phase, "step": stored.step}
            rows = [
                {
                    **place,
                    **redaction.values(_of_task(task_of(one.task_id))),
                    "task_id": one.task_id,
                    "attempt": one.attempt,
                    "outcome": str(one.outcome),
                    "solved": one.outcome is Outcome.SOLVED,
                    "is_failure": one.outcome.is_infrastructure_error,
                    "detail": one.detail,
                    "parts": [(name, part["value"]) for name, part in one.parts.items()],
                    "why": [(name, part["why"]) for name, part in one.parts.items()],
                    "messages": one.messages,
                    **{name: one.facts.get(name) for name in SCHEMA.names if name in one.facts},
                }
                for one in conversations(run, stored, redaction)
            ]
            writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
            n += len(rows)
    return n


def _of_task(task: Task | None) -> dict[str, str | None]:
    """Reference of a task, and the columns of its row as JSON."""
    columns = task.info.get("columns") if task else None
    return {
        "reference": task.reference if task else None,
        "columns": json.dumps(columns, ensure_ascii=False, default=str) if columns else None,
    }
