"""Trial of a recipe: a few real steps in a temporary folder, for time and memory."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.commands.output import EXIT_INTERRUPTED, Stopped
from rlhf.errors import TrainingError
from rlhf.rollout.reward_monitor import RewardMonitor
from rlhf.training.critics.settings import CriticCapabilities
from rlhf.training.stages.pair_settings import PairStage
from rlhf.training.stages.policy_gradient import PolicyGradient
from rlhf.training.stages.supervised import Supervised

if TYPE_CHECKING:
    from rlhf.recipe import Recipe

#: Hint where a process ended without a word of its own.
KILLED = "a process that SIGKILL ended is most often one that memory was too little for: lower what a step needs"
#: Tasks of the evaluations before and after, which a trial is not about.
_N_TASKS = 2


def try_out(recipe: Recipe, n_steps: int, n_processes: int = 1) -> dict[str, Any]:
    """Run `n_steps` of every stage and return what they took.

    Returns:
        `stages`: for each its label, seconds of each step, seconds that all its steps will take, and the most memory in
        bytes of a process so far, of the GPU where there is one. `on_gpu` says which.

    Raises:
        Stopped: the user stopped it.
        TrainingError: the trial ended early; what it had to say stands on standard error.
    """
    from rlhf.commands.launch import launch
    from rlhf.recipe import dump
    from rlhf.sinks import read_metrics

    with tempfile.TemporaryDirectory(prefix="rlhf-trial-") as folder:
        path, run = Path(folder) / "recipe.yaml", Path(folder) / "run"
        path.write_text(dump(recipe))
        run.mkdir()
        arguments = ["train", str(path), *shortened(recipe, n_steps), "--out", str(run), "--no-memory-check"]
        # On Ray the one process starts the learners.
        try:
            code = launch(arguments, 1 if recipe.cluster.is_on else n_processes, run, quiet=True)
        except TrainingError as error:
            error.where, error.hint = "--trial", KILLED
            raise
        if code == EXIT_INTERRUPTED:
            raise Stopped("stopped", where="--trial")
        if code:
            raise TrainingError(
                "the trial did not finish",
                where="--trial",
                got=f"exit code {code}",
                expected=f"{n_steps} steps of each stage",
                hint="its own message is above",
            )
        lines = list(read_metrics(run / "metrics.jsonl"))
    return {"n_steps": n_steps, **_figures(recipe, lines)}


def shortened(recipe: Recipe, n_steps: int) -> list[str]:
    """Return overrides that leave `n_steps` of every stage, next to nothing of evaluations, and publish nothing."""
    found = ["push_to_hub=null", "trackers=[]", f"evaluation.n_tasks={min(recipe.evaluation.n_tasks, _N_TASKS)}"]
    found += [
        f"rewards.{name}.monitor.window={RewardMonitor().window}" for name, one in recipe.rewards.items() if one.monitor
    ]
    for i, stage in enumerate(recipe.stages):
        if isinstance(stage, Supervised) and stage.reads_file:
            found += [f"stages.{i}.epochs=1", f"stages.{i}.data.max_rows={2 * n_steps * stage.batch_size}"]
            continue
        if isinstance(stage, PairStage) or (isinstance(stage, Supervised) and (stage.rejection_sampling or stage.data)):
            found.append(f"stages.{i}.epochs=1")
            continue
        if isinstance(stage, Supervised):
            n = min(stage.n_demonstrations, n_steps * stage.batch_size)
            found += [f"stages.{i}.epochs=1", f"stages.{i}.n_demonstrations={n}"]
            continue
        found += [f"stages.{i}.steps={n_steps}", f"stages.{i}.checkpoint_every=0"]
        if stage.patience is not None:  # asks for more evaluations than so few steps have
            found.append(f"stages.{i}.patience=null")
        if stage.evaluate_every:
            found.append(f"evaluation.validation_n_tasks={min(recipe.evaluation.validation_n_tasks, _N_TASKS)}")
        if stage.critic is not None and stage.critic.warmup_steps:
            found.append(f"stages.{i}.critic.warmup_steps=0")
            if CriticCapabilities(stage.critic).frozen:  # it is trained in its warm-up alone, and has to have one
                found.append(f"stages.{i}.critic.frozen=false")
        if stage.opponents is not None and stage.opponents.every >= n_steps:
            found.append(f"stages.{i}.opponents.keep=1")
        if stage.reference_reset is not None:  # which asks for evaluations on the way
            found.append(f"stages.{i}.reference_reset=null")
    return found


def _figures(recipe: Recipe, lines: Sequence[Any]) -> dict[str, Any]:
    stages, on_gpu = [], False
    for i, stage in enumerate(recipe.stages):
        own = [line.values for line in lines if line.stage.startswith(f"{i}-") and "memory/peak_gb" in line.values]
        seconds = [v["time/step_s"] + v.get("time/publish_s", 0.0) for v in own if "time/step_s" in v]
        on_gpu = on_gpu or any("memory/gpu_peak_gb" in values for values in own)
        peaks = [values.get("memory/gpu_peak_gb", values["memory/peak_gb"]) for values in own]
        n_steps = stage.steps if isinstance(stage, PolicyGradient) else 0
        stages.append(
            {
                "stage": f"stages[{i}]",
                "step_s": seconds,
                # The first step starts what the others find running.
                "stage_s": seconds[-1] * n_steps if seconds and n_steps else None,
                "peak_bytes": int(max(peaks) * 1e9) if peaks else None,
            }
        )
    return {"stages": stages, "on_gpu": on_gpu}
