"""`rlhf export --format inspect` and `--format parquet`: attempts for other tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.commands.contrib.stored import known, tasks_of_folder
from rlhf.commands.output import caution
from rlhf.errors import whole
from rlhf.evaluation.folder import no_run


def export_attempts(run: Path, out: Path, form: str, patterns: Sequence[str]) -> dict[str, Any]:
    """Write the attempts of a run or evaluation, redacted; returns what was written, in plain values.

    Args:
        run: folder of it.
        out: a folder of logs, or one Parquet file.
        form: `inspect` or `parquet`.
        patterns: of what is blacked out beside keys.

    Raises:
        CheckpointError: the disk is full or the place cannot be written.
        DataError: attempts cannot be read.
        RecipeError: there is no run.
    """
    from rlhf.viewer.flat_table import write_table
    from rlhf.viewer.inspect_log import write_log
    from rlhf.viewer.library import Library
    from rlhf.viewer.redaction import Redaction
    from rlhf.viewer.run_folder import is_run

    redaction = Redaction(patterns)
    if not is_run(run):
        raise no_run(run, "rlhf export", "a run or an evaluation")
    [shown] = Library([run]).runs()
    with whole("the attempts", out) as partial:
        if form == "parquet":
            tasks, problem = tasks_of_folder(run)
            if problem:
                caution(f"reference and columns are left empty where the tasks cannot be made again: {problem}")
            n = write_table(shown, partial, redaction, lambda task_id: known(tasks, task_id))
            return {"attempts": str(out), "n_attempts": n}
        partial.mkdir()
        logs = [write_log(shown, stored, partial, redaction) for stored in shown.attempts.steps()]
        return {"logs": str(out), "n_logs": len(logs)}
