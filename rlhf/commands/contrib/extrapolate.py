"""`rlhf extrapolate`: from checkpoints of a run to a policy further along the way that it took."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rlhf.commands.evaluate import newest, recipe_and_checkpoint
from rlhf.commands.output import AsJson, command, print_json, quiet_libraries, refuse_existing, results
from rlhf.errors import CheckpointError, RecipeError, whole
from rlhf.evaluation.folder import nearest_beside

if TYPE_CHECKING:
    from rlhf.training.contrib.weight_extrapolation import Direction
    from rlhf.training.policy.model import Policy


@command
def extrapolate(
    targets: Annotated[
        list[str], typer.Argument(metavar="RUN|CHECKPOINT...", help="A run, or checkpoints of one run.")
    ],
    out: Annotated[Path, typer.Option(help="Output model folder; must not exist.")],
    alpha: Annotated[float, typer.Option(help="Extrapolation factor; 1 reproduces the run, or the fitted line.")] = 1.0,
    target: Annotated[
        float | None, typer.Option(min=0, max=1, help="Success rate to extrapolate to; needs several checkpoints.")
    ] = None,
    success: Annotated[
        list[float] | None,
        typer.Option(
            min=0, max=1, help="Success rate of a checkpoint; repeat per checkpoint (default: from the run's log)."
        ),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(help="Checkpoint or model to start from (default: the start of the checkpoint's stage)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Extrapolate training along the first singular direction of each weight update.

    Without --target, the update of one checkpoint (for a run, its newest) is scaled by --alpha. With --target, a line
    is fitted to several checkpoints against their success rates: for a run, those kept of its last stage
    (keep_checkpoints) that were evaluated during training (evaluate_every).

    Examples: rlhf extrapolate runs/my-run --alpha 1.5 --out longer; rlhf extrapolate runs/my-run --target 0.9 --out on
    """
    refuse_existing(out)
    if success and target is None:
        raise RecipeError(
            "success rates define a line, which needs a target success rate",
            where="--success",
            got="no --target",
            expected="--success with --target",
            hint="give --target 0.9 and several checkpoints, or leave --success out",
        )
    checkpoints = _checkpoints(targets, several=target is not None)
    if target is None and len(checkpoints) > 1:
        raise RecipeError(
            "several checkpoints need a target success rate",
            where="--target",
            got="nothing",
            expected="a success between 0 and 1",
            hint="name one checkpoint, or give --target 0.9",
        )
    if target is None or success:
        successes = _given_successes(checkpoints, success) if success else []
    else:
        checkpoints, successes = _logged_successes(checkpoints, may_lack=len(targets) == 1)
    quiet_libraries()
    found, path = _write(checkpoints, successes, start, target, alpha, out)
    rows = _rows(found)
    record = {
        "model": str(path), "checkpoints": [str(c) for c in checkpoints], "successes": successes, "target": target,
        "alpha": alpha, "norm": rows[-1]["norm"], "rank_one_share": rows[-1]["rank_one_share"],
        "parameters": {n: {"norm": d.norm, "rank_one_share": d.share} for n, d in found.items()},
    }  # fmt: skip
    if as_json:
        print_json(record)
        return
    _print(rows, path)


def _checkpoints(targets: Sequence[str], *, several: bool) -> list[Path]:
    """Named checkpoints; of a run its newest, or all that its last stage kept."""
    from rlhf.training.checkpoints.store import every

    if len(targets) > 1 or not (Path(targets[0]) / "recipe.yaml").is_file():
        return [_checkpoint(target) for target in targets]
    last = newest(Path(targets[0]))
    assert last is not None  # the folder is that of a run
    if not several:
        return [last]
    stage = last.name.rpartition("-")[0]
    later = [p for p in every(last.parent) if p.name.startswith(f"{stage}-") and not p.name.endswith("-000000")]
    return later or [last]


def _checkpoint(target: str) -> Path:
    _, folder = recipe_and_checkpoint(target, None) if Path(target).is_dir() else (None, None)
    if folder is None:
        raise CheckpointError(
            "not a checkpoint of a run",
            where=target,
            got="another folder" if Path(target).is_dir() else "no such folder",
            expected="a folder in checkpoints/ of a run",
            hint=nearest_beside(Path(target))
            or "name a run, or folders such as runs/my-run/checkpoints/1-policy_gradient-000040",
        )
    return folder


def _given_successes(checkpoints: Sequence[Path], given: Sequence[float]) -> list[float]:
    """Success rate of each checkpoint, as given."""
    if len(given) != len(checkpoints):
        raise RecipeError(
            "there must be one success rate per checkpoint",
            where="--success",
            got=f"{len(given)} for {len(checkpoints)} checkpoints",
            expected="as many, in the same order",
        )
    return list(given)


def _logged_successes(checkpoints: Sequence[Path], *, may_lack: bool) -> tuple[list[Path], list[float]]:
    """Checkpoints and their success rates as logged; with `may_lack` of those alone that have one, if any has."""
    logged = [(folder, _logged_success(folder)) for folder in checkpoints]
    found = [(folder, success) for folder, success in logged if success is not None]
    if len(found) < len(logged) and not (may_lack and found):
        raise CheckpointError(
            "the success rate of this checkpoint is unknown",
            where=str(next(folder for folder, success in logged if success is None)),
            got="no evaluation during training at its step in metrics.jsonl",
            expected="evaluate_every and checkpoint_every that meet",
            hint="measure it with `rlhf evaluate`, and give --success once for each checkpoint",
        )
    return [folder for folder, _ in found], [success for _, success in found]


def _logged_success(checkpoint: Path) -> float | None:
    """Success rate of an evaluation during training at its step; that after training is of other tasks."""
    from rlhf.sinks import read_metrics

    run = checkpoint.parent.parent
    results = run / "result.json"
    final = json.loads(results.read_text("utf-8")).get("after", {}).get("version") if results.is_file() else None
    log = read_metrics(run / "metrics.jsonl")
    lines = [line.values for line in log if f"{line.stage}-{line.step:06d}" == checkpoint.name]
    logged = [(values["eval/version"], values["eval/success"]) for values in lines if "eval/version" in values]
    if logged and logged[-1][0] == final:
        del logged[-1]
    return float(logged[-1][1] or 0.0) if logged else None


def _write(
    checkpoints: Sequence[Path],
    successes: Sequence[float],
    start: Path | None,
    target: float | None,
    alpha: float,
    out: Path,
) -> tuple[Mapping[str, Direction], Path]:
    """Write the new model; returns the directions of the last checkpoint, and the folder."""
    from rlhf.training.backends.sharded import cast_parameters
    from rlhf.training.contrib import weight_extrapolation as maths
    from rlhf.training.policy.model_files import save_folder

    begin = start or checkpoints[-1].with_name(checkpoints[-1].name.rpartition("-")[0] + "-000000")
    policy = _policy(begin, checkpoints[-1])
    dtype = policy.model.dtype
    model = maths.merged(policy, exact=True)
    before = maths.weights_of(model)
    found = [maths.directions(before, maths.weights_of(maths.merged(_policy(c, c), exact=True))) for c in checkpoints]
    if not any(direction.norm for direction in found[-1].values()):
        raise CheckpointError(
            "no direction to extrapolate: no weight has changed",
            where=str(checkpoints[-1]),
            got=f"the weights of {begin}",
            expected="a checkpoint after the first update of its stage",
            hint="train on, or give --start FOLDER, the policy that training began with",
        )
    if target is None:
        changes = {name: maths.rank_one(d, alpha) for name, d in found[-1].items()}
    else:
        changes = {n: maths.at_success([f[n] for f in found], successes, target, alpha) for n in before}
    cast_parameters(model, dtype)
    maths.put(model, maths.moved(before, changes, dtype))
    with whole("the model", out) as partial:
        save_folder(model, partial)
        policy.tokenizer.save_pretrained(partial)
    return found[-1], out


def _policy(folder: Path, checkpoint: Path) -> Policy:
    """The policy in `folder`, by the recipe of the run that `checkpoint` belongs to."""
    from rlhf.build.train import policy_settings_of
    from rlhf.training.policy.model import restore

    if not folder.is_dir():
        raise CheckpointError(
            "no start checkpoint to extrapolate from",
            where=str(folder),
            got="no such folder",
            expected="the stage's first policy, or a model folder",
            hint="give --start FOLDER",
        )
    run = checkpoint.parent.parent
    settings = policy_settings_of(run)
    if not (folder / "policy").is_dir():
        return restore(settings, folder, run)
    return restore(settings, folder / "policy", folder.parent.parent)


def _rows(found: Mapping[str, Direction]) -> list[dict[str, Any]]:
    """Norm of the change and share of its first direction, by kind of parameter, and in all."""
    kinds: dict[str, list[Direction]] = defaultdict(list)
    for name, direction in found.items():
        kinds[".".join(part for part in name.split(".")[-3:] if not part.isdecimal())].append(direction)
    kinds["all"] = list(found.values())
    rows = []
    for kind, members in kinds.items():
        total, first = sum(d.norm**2 for d in members), sum(d.sigma**2 for d in members)
        share = first / total if total else 1.0
        rows.append({"kind": kind, "n": len(members), "norm": total**0.5, "rank_one_share": share})
    return rows


def _print(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    console, table = results(), Table(box=None, pad_edge=False)
    for column in ("parameters", "n", "norm of change", "in rank 1"):
        table.add_column(column, justify="left" if column == "parameters" else "right", no_wrap=True)
    for row in rows:
        table.add_row(row["kind"], str(row["n"]), f"{row['norm']:.4g}", f"{row['rank_one_share']:.1%}")
    console.print(table)
    console.print(f"model {path}", soft_wrap=True)
    console.print(f"measure it: rlhf evaluate RUN --checkpoint {path}", soft_wrap=True)
