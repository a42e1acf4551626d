"""`rlhf export`: the policy of a checkpoint as a model folder that needs nothing of this project, or attempts."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf.commands.evaluate import newest
from rlhf.commands.output import (
    AsJson,
    caution_without_digests,
    command,
    one_of,
    print_json,
    quiet_libraries,
    refuse_existing,
    results,
)
from rlhf.digests import verify
from rlhf.errors import CheckpointError, UsageError, nearest
from rlhf.evaluation.folder import run_around, where_to_look


class Format(StrEnum):
    """Forms of what is exported."""

    model = "model"
    inspect = "inspect"
    parquet = "parquet"


@command
def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run (its newest checkpoint) or a checkpoint.")
    ],
    out: Annotated[Path, typer.Option(help="Output folder or file; must not exist.")],
    form: Annotated[
        str,
        typer.Option(
            "--format", metavar="|".join(Format), help="The policy, or all attempts as Inspect logs or a Parquet table."
        ),
    ] = Format.model.value,
    redact: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Redact matches of this regular expression from attempts. Repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export the policy of a run or checkpoint as a Hugging Face model folder.

    --format inspect exports the attempts of a run or evaluation as logs for `inspect view`, --format parquet as one
    table. API keys of common formats are redacted.

    An adapter is merged into its base weights; full weights are copied unchanged. The memory store of an agent is
    exported as store.sqlite, which transformers and vLLM ignore.

    Examples: rlhf export runs/my-run --out my-model; rlhf export runs/my-run --format inspect --out logs
    """
    refuse_existing(out)
    wanted = one_of(Format, form, "--format", "format")
    if wanted is Format.model and redact:
        raise UsageError(
            "a model has no text to redact",
            where="--redact",
            got="--format model, the default",
            expected="a --format of trajectories",
            hint=f"--format {Format.parquet.value}, or leave --redact out",
        )
    if wanted is not Format.model:
        _export_attempts(Path(checkpoint), out, wanted, redact or [], as_json=as_json)
        return
    folder = _checkpoint(Path(checkpoint))
    quiet_libraries()
    from rlhf.build.model_folder import write_model

    is_merged, n_entries = write_model(folder, out)
    record: dict[str, Any] = {"model": str(out), "checkpoint": str(folder), "merged": is_merged}
    if n_entries is not None:
        record["n_entries"] = n_entries
    record["n_bytes"] = sum(p.stat().st_size for p in out.iterdir())
    if as_json:
        print_json(record)
        return
    how = "an adapter, merged into its base" if is_merged else "full weights, copied"
    how += "" if n_entries is None else f", with a store of {n_entries} entries"
    results().print(f"model {out}  (of {folder.name}; {record['n_bytes'] / 1e6:.1f} MB: {how})", soft_wrap=True)


def _export_attempts(run: Path, out: Path, form: Format, patterns: list[str], *, as_json: bool) -> None:
    from rlhf.commands.contrib.export_attempts import export_attempts

    told = export_attempts(run, out, form.value, patterns)
    if as_json:
        print_json(told)
    else:
        results().print(", ".join(f"{name} {value}" for name, value in told.items()), soft_wrap=True)


def _checkpoint(asked: Path) -> Path:
    """Checkpoint of a path: itself, the newest of a run, or that of a policy folder."""
    from rlhf.training.checkpoints.snapshot import damage
    from rlhf.training.checkpoints.store import every

    folder = asked.parent if (asked.parent / "state.json").is_file() else asked
    if (folder / "recipe.yaml").is_file():
        folder = newest(folder) or folder
    if not (folder / "state.json").is_file() or not (folder.parent.parent / "recipe.yaml").is_file():
        around = run_around(folder)
        around = around if around is not None and (around / "checkpoints").is_dir() else None
        near = nearest(folder.name, [p.name for p in every(folder.parent)]) if folder.parent.is_dir() else ""
        raise CheckpointError(
            "not a checkpoint of a run",
            where=str(asked),
            got="another folder" if folder.is_dir() else "no such folder",
            expected="a folder in checkpoints/ of a run, whose recipe describes the model",
            hint=near or (f"rlhf export {around} takes the newest" if around is not None else where_to_look(asked)),
        )
    found = damage(folder)
    if found is not None:
        raise CheckpointError("this checkpoint is damaged", where=str(folder), got=found, hint="export another")
    verify(folder, "policy", hint="export another")
    caution_without_digests(folder)
    return folder
