"""Learning speed of advantage estimators on a task with delayed reward, over several seeds.

    python benchmarks/credit.py
    python benchmarks/credit.py grpo gigpo 'gigpo, γ = 1={kind: gigpo, gamma: 1.0}' --chart docs/images/credit.svg
    python benchmarks/credit.py grpo gigpo --tune 100
    python benchmarks/credit.py archer grpo --task rooms-3 --seeds 0 1 2 --out runs/credit-small
    python benchmarks/credit.py gigpo gigpo@1e-4 planner --task cooking --seeds 0 1 2

For each seed a model is made from scratch and imitates spoilt demonstrations; all estimators of that seed start from
it, but a planner from one that imitated as many with subgoals. Success is measured on fixed unseen tasks as environment
steps go by, and each run is stopped once it has had its budget of them. Every run leaves a file under `--out` and is
not repeated, so the whole can be stopped and started again; runs of another task are not taken for those that are
wanted, and need another folder. `--tune SEED` tries the learning rates of `RATES` instead.
`rooms-4` is `environments/games/key_door.py` in houses of 4 x 4 rooms, `rooms-3` for what needs too many steps
there, and
`cooking` a meal of TextWorldExpress, for which nothing but eating it is rewarded. `NAME@LR` is an arm with another
learning rate than its own.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from charts import Band, Series, line_chart

from rlhf.evaluation.statistics import Estimate, mean_interval
from rlhf.sinks import read_metrics

#: Learning rates that `--tune` tries, the same for every estimator.
RATES = (5e-4, 1e-3)


@dataclass(frozen=True)
class Setting:
    """The task.

    Attributes:
        title: of the chart.
        environment: its kind and keys.
        limits: of the recipe.
        demonstrations: keys of the stage that imitates them; spoilt so that the start solves some of the tasks.
        budget: environment steps of training that each run has.
        model: what it changes in `MODEL`.
    """

    title: str
    environment: Mapping[str, Any]
    limits: Mapping[str, Any]
    demonstrations: Mapping[str, Any]
    budget: int
    model: Mapping[str, Any]

    def recipe(self, agent: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a recipe that say what the task is, for an agent."""
        return {
            "environment": self.environment,
            "agent": agent,
            "rewards": {"success": {"kind": "outcome"}},
            "limits": {"max_turns": self.environment["max_steps"], "max_concurrent": 128, **self.limits},
        }


def houses(n_rooms: int, loops: int, max_steps: int, random_share: float, budget: int) -> Setting:
    """Houses of so many rooms on each side."""
    keys = {"rows": n_rooms, "columns": n_rooms, "loops": loops, "max_steps": max_steps}
    return Setting(
        "Keyhole", {"kind": "keyhole", **keys}, {"max_tokens": 6}, {"random_share": random_share}, budget, {}
    )


TASKS: Mapping[str, Setting] = {
    "rooms-4": houses(4, 6, 16, 0.75, 20_000),
    "rooms-3": houses(3, 4, 10, 0.55, 12_000),
    "cooking": Setting(
        "Cooking",
        {
            "kind": "textworld_express",
            "game": "cookingworld",
            "params": {"numLocations": 1, "numIngredients": 1, "numDistractorItems": 0, "includeDoors": 0},
            "max_steps": 16,
        },
        {"max_tokens": 24},
        {
            "n_demonstrations": 800,
            "random_share": 0.3,
            "epochs": 4,
            "batch_size": 4,
            "optimizer": {"lr": 2e-3, "schedule": "cosine", "warmup_steps": 20},
        },
        20_000,
        {"hidden_size": 128, "n_heads": 8, "max_context": 4096},
    ),
}
MODEL: Mapping[str, Any] = {
    "kind": "from_scratch", "hidden_size": 96, "n_layers": 2, "n_heads": 3, "vocab_size": 512, "max_context": 768,
}  # fmt: skip
SUPERVISED: Mapping[str, Any] = {
    "kind": "supervised", "n_demonstrations": 1500, "observation_weight": 0.5, "epochs": 3,
    "batch_size": 8, "optimizer": {"lr": 3e-3, "schedule": "cosine", "warmup_steps": 20},
}  # fmt: skip
#: One update per step, on samples of the present policy: no loss has to correct for older ones. The number of steps is
#: more than any run needs: an episode takes a step of the environment at least.
POLICY_GRADIENT: Mapping[str, Any] = {
    "kind": "policy_gradient", "tasks_per_step": 8, "group_size": 8, "steps": 500, "evaluate_every": 3,
    "checkpoint_every": 0,
}  # fmt: skip

#: A critic of turns learns before the policy moves: its first advantages are noise. In a step, Q is learnt from ten
#: times as many trajectories as the step has.
ARCHER: Mapping[str, Any] = {
    "kind": "archer",
    "updates_per_step": 20,
    "batch_size": 32,
    "bootstrap": False,
    "warmup_steps": 5,
    "optimizer": {"lr": 1e-3},
}
#: Tasks of keyhole have no reference, so this critic knows no more than the policy.
SWEET: Mapping[str, Any] = {
    "kind": "sweet",
    "privileged_text": "",
    "beta": 1.0,
    "warmup_steps": 4,
    "optimizer": {"lr": 3e-4},
}


@dataclass(frozen=True)
class Arm:
    """One estimator of the comparison.

    Attributes:
        label: in tables, and the name of its runs' folders.
        stage: what it changes in `POLICY_GRADIENT`.
        lr: learning rate, the best of `RATES` on a seed that is not among those measured.
        agent: whose demonstrations its start imitates.
    """

    label: str
    stage: Mapping[str, Any]
    lr: float = 5e-4
    agent: Mapping[str, Any] = field(default_factory=lambda: FLAT)


FLAT: Mapping[str, Any] = {"kind": "chat", "system": ""}
PLANNER: Mapping[str, Any] = {"kind": "planner", "plan_system": "", "executor": {"system": ""}}
#: Of every critic of what follows: the limit on steps is part of this task, so a state that it cuts has no future.
CRITIC: Mapping[str, Any] = {"bootstrap": False, "warmup_steps": 1, "optimizer": {"lr": 1e-3}}

#: Each with its defaults and the loss it is usually given; critics with what docs/critics.md advises.
ARMS: Mapping[str, Arm] = {
    arm.label: arm
    for arm in (
        Arm("grpo", {"advantage": {"kind": "grpo"}}),
        Arm("rloo", {"advantage": {"kind": "rloo"}, "loss": {"kind": "reinforce"}}),
        Arm("stratified", {"advantage": {"kind": "stratified"}}),
        Arm("gigpo", {"advantage": {"kind": "gigpo"}}),
        Arm("hgpo", {"advantage": {"kind": "hgpo"}}),
        Arm("gae", {"advantage": {"kind": "gae"}, "critic": CRITIC}),
        Arm("turn_gae", {"advantage": {"kind": "turn_gae"}, "critic": CRITIC}),
        Arm("bilevel_gae", {"advantage": {"kind": "bilevel_gae"}, "critic": CRITIC}),
        Arm("sweet", {"advantage": {"kind": "sweet"}, "critic": SWEET}),
        Arm("archer", {"advantage": {"kind": "archer"}, "critic": ARCHER, "loss": {"kind": "reinforce"}}),
        Arm("planner", {"advantage": {"kind": "two_level", "gamma": 0.99}}, 1e-4, PLANNER),
    )
}


@dataclass(frozen=True)
class Curve:
    """Success on unseen tasks of one run.

    Attributes:
        steps: environment steps of training before each measurement, from 0.
        success: share of the tasks solved.
    """

    steps: Sequence[float]
    success: Sequence[float]

    def at(self, steps: Sequence[float]) -> list[float]:
        """Success after `steps`, on straight lines between the measurements."""
        return [float(x) for x in np.interp(steps, self.steps, self.success)]

    def area(self, budget: float) -> float:
        """Mean success from 0 to `budget`: the area under the curve, over the budget."""
        inside = [x for x in self.steps if x < budget]
        return float(np.trapezoid(self.at([*inside, budget]), [*inside, budget])) / budget


def arm_of(text: str) -> Arm:
    """Read an arm: an estimator's name, `name@lr`, `label={kind: ...}`, or `label={advantage: ..., critic: ...}`."""
    label, _, values = text.partition("=")
    name, _, lr = label.partition("@")
    if lr:
        return replace(arm_of(name), label=label, lr=float(lr))
    if not values:
        return ARMS.get(label, Arm(label, {"advantage": {"kind": label}}))
    given = yaml.safe_load(values)
    stage = given if "advantage" in given else {"advantage": given}
    known = ARMS.get(stage["advantage"]["kind"], Arm(label, {}))
    return replace(known, label=label, stage={**known.stage, **stage})


def start(setting: Setting, agent: Mapping[str, Any], seed: int, out: Path) -> Path:
    """Return the folder of the weak policy that every run of `seed` with `agent` starts from; made once."""
    folder = out / (f"start-seed{seed}" if agent == FLAT else f"start-{agent['kind']}-seed{seed}")
    stage = {
        "name": "start",
        "seed": seed,
        "policy": {**MODEL, **setting.model},
        "evaluation": {"n_tasks": 200},
        "stages": [{**SUPERVISED, **setting.demonstrations}],
    }
    if not (folder / "result.json").is_file():
        subprocess.run(command(folder, {**setting.recipe(agent), **stage}), check=True)
    return max((folder / "checkpoints").glob("*/policy"))


def make_starts(setting: Setting, arms: Sequence[Arm], seeds: Sequence[int], out: Path, n_workers: int) -> None:
    """Make what runs of `arms` start from."""
    agents = [arm.agent for i, arm in enumerate(arms) if arm.agent not in [one.agent for one in arms[:i]]]
    pairs = [(agent, seed) for agent in agents for seed in seeds]
    with ThreadPoolExecutor(n_workers) as pool:
        list(pool.map(lambda pair: start(setting, pair[0], pair[1], out), pairs))


def command(folder: Path, recipe: Mapping[str, Any]) -> list[str]:
    """Return the command that trains `recipe`, or goes on where its folder is there already."""
    path = beside(folder, "yaml")
    path.write_text(yaml.safe_dump(json.loads(json.dumps(recipe)), sort_keys=False))
    where = ["--resume", str(folder)] if (folder / "recipe.yaml").is_file() else [str(path), "--out", str(folder)]
    return [sys.executable, "-m", "rlhf.cli", "train", *where]


def folder_for(task: str, out: Path | None) -> Path:
    """Make the folder of a task's runs: `out`, by default one for each task. Raises SystemExit for that of another."""
    folder = out or Path("runs/credit" if task == "rooms-4" else f"runs/credit-{task}")
    wanted = json.loads(json.dumps(TASKS[task].environment))
    for path in sorted(folder.glob("*.yaml")):  # `command` keeps the recipe of each run beside it
        if (yaml.safe_load(path.read_text()) or {}).get("environment") != wanted:
            raise SystemExit(f"{path} is of another task than {task}: give another folder, --out FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def beside(folder: Path, ending: str) -> Path:
    return folder.with_name(f"{folder.name}.{ending}")


def run(setting: Setting, arm: Arm, lr: float, seed: int, split: str, out: Path) -> Curve:
    """Train one estimator with one seed until its budget is spent, unless that is done already."""
    of_split = "" if split == "test" else f"-{split}"
    folder = out / f"{arm.label.replace(' ', '')}-lr{lr:g}-seed{seed}{of_split}"
    result = beside(folder, "json")
    if not result.is_file():
        stage = {**POLICY_GRADIENT, **arm.stage, "optimizer": {"lr": lr}}
        # Curves are of the tasks that results are of: nothing is chosen by them.
        watched = {"split": split, "n_tasks": 100, "validation_split": split, "validation_n_tasks": 100}
        recipe = {
            **setting.recipe(arm.agent),
            "name": "credit",
            "seed": seed,
            "policy": {"kind": "pretrained", "path": str(start(setting, arm.agent, seed, out).resolve())},
            "evaluation": {**watched, "allow_overlap": True},
            "stages": [stage],
        }
        begun = time.perf_counter()
        with beside(folder, "log").open("a") as log:
            process = subprocess.Popen(command(folder, recipe), stdout=log, stderr=log)
            curve = until_spent(process, folder, setting.budget)
        time_s = time.perf_counter() - begun
        print(f"{folder.name}: {curve.area(setting.budget):.1%} in {time_s:.0f} s", file=sys.stderr, flush=True)
        result.write_text(json.dumps({"steps": curve.steps, "success": curve.success, "time_s": time_s}))
    found = json.loads(result.read_text())
    return Curve(found["steps"], found["success"])


def until_spent(process: subprocess.Popen[bytes], folder: Path, budget: int) -> Curve:
    """Wait until a run was measured after its budget was spent, and stop it then."""
    try:
        while True:
            curve = curve_of(folder)
            if curve.steps and curve.steps[-1] >= budget:
                return curve
            if process.poll() is not None:
                raise SystemExit(f"{folder} ended before its budget was spent; see {folder.with_suffix('.log')}")
            time.sleep(0.5)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait()


def curve_of(folder: Path) -> Curve:
    """Read the measurements that a run has made so far."""
    path, n_steps = folder / "metrics.jsonl", 0.0
    steps: list[float] = []
    success: list[float] = []
    for line in read_metrics(path) if path.is_file() else ():
        n_steps += (line.values.get("rollout/n_turns_mean") or 0.0) * (line.values.get("rollout/n_episodes") or 0.0)
        solved = line.values.get("eval/success")
        if solved is not None:
            steps.append(round(n_steps))
            success.append(solved)
    return Curve(steps, success)


def tune(setting: Setting, arms: Sequence[Arm], seed: int, out: Path, n_workers: int) -> None:
    """Print mean success over the budget for each learning rate, on tasks of the split `dev`."""
    make_starts(setting, arms, [seed], out, n_workers)
    print(f"| estimator | {' | '.join(f'{lr:g}' for lr in RATES)} |\n|---|{'---|' * len(RATES)}")
    with ThreadPoolExecutor(n_workers) as pool:
        pairs = [(arm, lr) for arm in arms for lr in RATES]
        curves = pool.map(lambda pair: run(setting, pair[0], pair[1], seed, "dev", out), pairs)
        areas = [curve.area(setting.budget) for curve in curves]
    for i, arm in enumerate(arms):
        found = areas[i * len(RATES) : (i + 1) * len(RATES)]
        print(f"| {arm.label} | {' | '.join(f'{area:.1%}' for area in found)} |", flush=True)


def row(label: str, curves: Sequence[Curve], first: Sequence[Curve], budget: int) -> str:
    """Return one row of the table; `first` are the runs of the same seeds that it is compared with."""
    areas, bases = ([curve.area(budget) for curve in found] for found in (curves, first))
    begun, last = ([curve.at([at])[0] for curve in curves] for at in (0, budget))
    more = "" if curves is first else points(mean_interval([a - b for a, b in zip(areas, bases, strict=True)]))
    risen = points(mean_interval([b - a for a, b in zip(begun, last, strict=True)]))
    return f"| {label} | {share(mean_interval(areas))} | {more} | {share(mean_interval(last))} | {risen} |"


def share(found: Estimate) -> str:
    low, high = max(found.low, 0.0), min(found.high, 1.0)
    return f"{found.value:.1%} ({low:.1%} to {high:.1%})"


def points(found: Estimate) -> str:
    return f"{100 * found.value:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def chart(curves: Mapping[str, Sequence[Curve]], setting: Setting) -> str:
    """Draw the mean over the seeds of each estimator with its 95% interval."""
    grid = [setting.budget * i / 32 for i in range(33)]
    lines, bands = [], []
    for label, found in curves.items():
        means = [mean_interval(values) for values in zip(*(curve.at(grid) for curve in found), strict=True)]
        lines.append(Series(label, grid, [m.value for m in means]))
        bands.append(Band(label, grid, [max(m.low, 0.0) for m in means], [min(m.high, 1.0) for m in means]))
    title = f"{setting.title}: success on unseen tasks, mean of {len(next(iter(curves.values())))} seeds"
    return line_chart(
        lines, title, "environment steps of training", "solved", bands, percent=True, y_range=(0, 1), width=760,
        height=380,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", default=["grpo", "gigpo"], help=f"{', '.join(ARMS)}, or others")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--task", choices=TASKS, default="rooms-4")
    parser.add_argument("--out", type=Path, help="runs/credit for rooms-4, else runs/credit-TASK")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument("--tune", type=int, metavar="SEED")
    parser.add_argument("--chart", type=Path, metavar="FILE")
    settings = parser.parse_args()
    out, setting = folder_for(settings.task, settings.out), TASKS[settings.task]
    arms = [arm_of(text) for text in settings.arms]
    if settings.tune is not None:
        return tune(setting, arms, settings.tune, out, settings.workers)
    make_starts(setting, arms, settings.seeds, out, settings.workers)
    with ThreadPoolExecutor(settings.workers) as pool:
        pairs = [(arm, seed) for seed in settings.seeds for arm in arms]
        done = pool.map(lambda pair: run(setting, pair[0], pair[0].lr, pair[1], "test", out), pairs)
        found = dict(zip(((arm.label, seed) for arm, seed in pairs), done, strict=True))
    curves = {arm.label: [found[arm.label, seed] for seed in settings.seeds] for arm in arms}
    first = curves[arms[0].label]
    more = f"points more than {arms[0].label}"
    print(f"| estimator | mean success over the budget | {more} | success at its end | points above the start |")
    print("|---|---|---|---|---|")
    for label, runs in curves.items():
        print(row(label, runs, first, setting.budget))
    if settings.chart:
        settings.chart.parent.mkdir(parents=True, exist_ok=True)
        settings.chart.write_text(chart(curves, setting))


if __name__ == "__main__":
    main()
