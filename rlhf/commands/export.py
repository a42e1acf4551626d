"""`rlhf export`: the policy of a checkpoint as a model folder that needs nothing of this project."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf.commands.evaluate import newest
from rlhf.commands.output import (
    AsJson,
    caution_without_digests,
    command,
    print_json,
    quiet_libraries,
    refuse_existing,
    results,
)
from rlhf.digests import verify
from rlhf.errors import CheckpointError, disk, nearest
from rlhf.evaluation.folder import run_around, where_to_look


@command
def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run, for its newest checkpoint, or one of them.")
    ],
    out: Annotated[Path, typer.Option(help="Where the model goes: a folder that does not exist.")],
    as_json: AsJson = False,
) -> None:
    """Export the policy of a run or checkpoint as an ordinary Hugging Face folder.

    An adapter is merged into the weights it was trained over; full weights are copied as they are. The store of an
    agent that remembers goes with them, as store.sqlite, which transformers and vLLM take no notice of.

    Example: rlhf export runs/my-run --out my-model
    """
    refuse_existing(out)
    folder = _checkpoint(Path(checkpoint))
    quiet_libraries()
    is_merged = (folder / "policy" / "adapter_config.json").is_file()
    partial = out.with_name(f".{out.name}.partial")
    with disk("the model", out):
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            if is_merged:
                _merge(folder, partial)
            else:
                shutil.copytree(folder / "policy", partial, dirs_exist_ok=True)
            n_entries = _copy_store(folder, partial)
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
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


def _copy_store(folder: Path, into: Path) -> int | None:
    """Copy a checkpoint's memory store; returns its number of entries, None where there is none.

    Raises:
        StoreError: it is damaged.
    """
    from agents.stores import copies
    from agents.stores.store import Store

    if not (folder / copies.FILE).is_file():
        return None
    copies.restore(folder, into / copies.FILE)
    shutil.copyfile(folder / copies.HASH, into / copies.HASH)
    with Store(into / copies.FILE) as store:
        return len(store.entries())


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
            expected="a folder in checkpoints/ of a run, which says what model the policy is",
            hint=near or (f"rlhf export {around} takes the newest" if around is not None else where_to_look(asked)),
        )
    found = damage(folder)
    if found is not None:
        raise CheckpointError("this checkpoint is damaged", where=str(folder), got=found, hint="export another")
    verify(folder, "policy", hint="export another")
    caution_without_digests(folder)
    return folder


def _merge(folder: Path, into: Path) -> None:
    from rlhf.build.train import policy_of, recipe_of
    from rlhf.training.contrib.weight_extrapolation import merged

    policy = policy_of(recipe_of(folder.parent.parent), folder)
    merged(policy).save_pretrained(into)
    policy.tokenizer.save_pretrained(into)
