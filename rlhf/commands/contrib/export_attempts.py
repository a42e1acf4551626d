"""`rlhf export --format inspect` and `--format parquet`: attempts for other tools."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import disk
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
    partial = out.with_name(f".{out.name}.partial")
    with disk("the attempts", out):
        try:
            if form == "parquet":
                out.parent.mkdir(parents=True, exist_ok=True)
                record = {"attempts": str(out), "n_attempts": write_table(shown, partial, redaction)}
            else:
                partial.mkdir(parents=True)
                logs = [write_log(shown, stored, partial, redaction) for stored in shown.attempts.steps()]
                record = {"logs": str(out), "n_logs": len(logs)}
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink(missing_ok=True)
    return record
