"""Every estimator with a loss it is used with, and every loss with its estimator: one small task, several seeds.

    python benchmarks/algorithms.py                         # a few of them, one seed, in minutes
    python benchmarks/algorithms.py all --seeds 0 1 2       # all, an hour on a core
    python benchmarks/algorithms.py all --seeds 0 1 2 --write

The task is `environments/games/key_door.py` in houses of 3 x 3 rooms. For each seed a model is made from scratch and
imitates
spoilt demonstrations; every run of that seed starts from it and is stopped once it has had its budget of environment
steps. Success is measured on fixed tasks that no run trains on. Nothing is tuned for a single algorithm: all have one
learning rate. Every run leaves a file under `--out` and is not repeated, so the whole can be stopped and started again.
`--write` puts the table into `docs/algorithms/measured.md` and a line into the page of each algorithm.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from credit import Curve, curve_of, points, share
from pages import write_between

from rlhf.build.train import train
from rlhf.evaluation.statistics import mean_interval
from rlhf.recipe import load
from rlhf.terminal import CleanConsole

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from tests.combinations import (  # noqa: E402
    CRITIC,
    ESTIMATORS,
    OTHER_LOSSES,
    OTHERS,
    TOLD_CRITIC,
    TURN_CRITIC,
    WITH_CRITIC,
    WITH_MECHANISM,
    WITH_TOLD_CRITIC,
    WITH_TURN_CRITIC,
    stage_of_loss,
)

T = TypeVar("T")
PAGES = ROOT / "docs" / "algorithms"
MARKS = "<!-- measured -->", "<!-- end of measured -->"
#: Environment steps of training that each run has.
BUDGET = 4_000
#: What the others are compared with.
FIRST = "grpo"

TASK: Mapping[str, Any] = {
    "environment": {"kind": "keyhole", "rows": 3, "columns": 3, "loops": 4, "max_steps": 10},
    "agent": {"kind": "chat", "system": ""},
    "rewards": {"success": {"kind": "outcome"}, "cost": {"kind": "turn_cost", "weight": 0}},
    "limits": {"max_turns": 10, "max_tokens": 6, "max_concurrent": 128},
}
MODEL: Mapping[str, Any] = {
    "kind": "from_scratch", "hidden_size": 64, "n_layers": 2, "n_heads": 4, "head_dim": 16, "vocab_size": 512,
    "max_context": 512,
}  # fmt: skip
SUPERVISED: Mapping[str, Any] = {
    "kind": "supervised", "n_demonstrations": 1000, "random_share": 0.55, "observation_weight": 0.5, "epochs": 3,
    "batch_size": 8, "optimizer": {"lr": 3e-3, "schedule": "cosine", "warmup_steps": 20},
}  # fmt: skip
#: Further from the start on demonstrations that are less spoilt: what teaches `kdrl`.
TEACHER: Mapping[str, Any] = {
    **SUPERVISED, "n_demonstrations": 500, "random_share": 0.2, "epochs": 2, "optimizer": {"lr": 2e-3},
}  # fmt: skip
POLICY_GRADIENT: Mapping[str, Any] = {
    "kind": "policy_gradient", "tasks_per_step": 4, "group_size": 8, "steps": 400, "evaluate_every": 4,
    "checkpoint_every": 0, "optimizer": {"lr": 5e-4},
}  # fmt: skip
#: Label -> the agent that a run has in the place of the task's, and whose demonstrations its start imitates.
AGENTS: Mapping[str, Mapping[str, Any]] = {
    "two_level": {"kind": "planner", "plan_system": "", "executor": {"system": ""}},
}
#: Of each measurement.
N_TASKS = 64


@dataclass(frozen=True)
class Arm:
    """One run of each seed.

    Attributes:
        label: in tables, and the name of its runs' files.
        stage: what it changes in `POLICY_GRADIENT`.
        pages: of `docs/algorithms` that it is the measurement of.
        rewards: of the recipe.
        note: what the figure has to be read with.
    """

    label: str
    stage: Mapping[str, Any]
    pages: Sequence[str]
    rewards: Mapping[str, Any]
    note: str


#: What an estimator is defined with, where that is not PPO clip on eight attempts at each of four tasks.
_SINGLE: Mapping[str, Any] = {"tasks_per_step": 32, "group_size": 1}
#: The limit on steps is part of this task: a state that it cuts has no future, and is not to be valued as if it had.
_ENDS: Mapping[str, Any] = {"bootstrap": False}
#: Of a critic whose rate on tasks of seconds is too high for this one. Tasks of keyhole have no reference.
_SLOWER: Mapping[str, Any] = {"privileged_text": "", "warmup_steps": 4, "epochs": 4, "optimizer": {"lr": 3e-4}}
_TREE: Mapping[str, Any] = {"rollout": {"kind": "tree", "branches_per_round": 3}}
ESTIMATOR_STAGES: Mapping[str, Mapping[str, Any]] = {
    "reinforce_pp": _SINGLE,
    **{name: {**_SINGLE, "critic": {**CRITIC, **_ENDS}} for name in WITH_CRITIC},
    **{name: {**_SINGLE, "critic": {**TURN_CRITIC, **_ENDS}} for name in WITH_TURN_CRITIC},
    **{name: {"critic": {**TOLD_CRITIC, **_SLOWER}} for name in WITH_TOLD_CRITIC},
    "tree_grpo": _TREE,
    "treerl": _TREE,
    "loop": {
        "loss": {"kind": "ppo_clip", "clip_low": 0.090909, "clip_high": 0.1},
        "reduction": {"kind": "seq_mean_token_mean"},
    },
    "lightning": {"reduction": {"kind": "per_trajectory_mean"}},
    "guided": {
        "advantage": {"kind": "guided", "baseline": "own"},
        "loss": {"kind": "luffy"},
        "group_demonstrations": {},
    },
}
LOSS_STAGES: Mapping[str, Mapping[str, Any]] = {
    "min_entropy": {"loss": {"kind": "min_entropy"}, "filters": {"drop_zero_advantage": False}},
}
#: Label -> page and keys: GRPO and PPO clip with one thing changed around the loss.
AROUND: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "kl: k3": ("kl", {"loss": {"kind": "ppo_clip", "kl": "k3", "kl_coef": 0.01}}),
    "seq_mean_token_mean": ("reductions", {"reduction": {"kind": "seq_mean_token_mean"}}),
    "seq_mean_token_sum": ("reductions", {"reduction": {"kind": "seq_mean_token_sum"}}),
    "high_entropy_share: 0.2": ("filters", {"filters": {"high_entropy_share": 0.2}}),
}
_ALONE = "One attempt at each of 32 tasks, where the others make eight at each of four."
_TREES = "Two trees of four attempts at each task; steps that are replayed count like others."
NOTES: Mapping[str, str] = {
    "reinforce_pp": _ALONE,
    **dict.fromkeys((*WITH_CRITIC, *WITH_TURN_CRITIC), f"{_ALONE} The critic has `bootstrap: false`."),
    "archer": "It sees rewards through its critic alone, and the budget is some 400 attempts, too few to teach that; "
    "with a warm-up, a slower critic and three times the budget [it learned on an earlier edition]"
    "(../estimator_comparison.md#a-critic-of-turns). One attempt at each of 32 tasks, `bootstrap: false`.",
    "sweet": "Keyhole tasks have no reference, so its critic has no privileged information; it is trained on "
    "128 attempts in warm-up, and the policy then exploits its errors.",
    "tree_grpo": _TREES,
    "treerl": _TREES,
    "two_level": "A planner names subgoals and an executor acts, both GRPO; it imitates demonstrations with subgoals.",
    "step_grpo": "Only last turns are rewarded here, and nothing tells it what to do before.",
    "progress": "The outcome stands for the contributions of turns; every action that is carried out earns 0.5.",
    "hrpo": "The reward of turns is a cost of 0.01 each.",
    "loop": "With the bounds and the reduction of the paper.",
    "lightning": "With one weight for each trajectory: as set here it is the algorithm of `seq_mean_token_mean`.",
    "guided": "With `baseline: own` and a demonstration in each group, so that it sees solutions that the other "
    "estimators must discover.",
    "task_normalised": "Around GiGPO. There is one type of task here, so it only scales.",
    "ktae": "Around Lite PPO.",
    "hicra": "There are no plans in this task: the tokens that it raises are arbitrary ones.",
    "duration_aware": "Around GRPO. Its runs depend on measured durations and are not reproducible.",
    "gspo": "With bounds of 0.1, since the default ones are for far lower learning rates.",
    "shiq": "With β 0.03.",
    "reinforce": "One update in each step, where PPO clip makes four.",
    "min_entropy": "It sees no reward, and this policy is mostly wrong. One update in each step.",
    "kdrl": "The teacher is the initial policy after further SFT on demonstrations with 20% random actions.",
}


def arms() -> list[Arm]:
    """List estimators, then losses, then what goes around a loss."""
    clipped = stage_of_loss("ppo_clip")
    keys: dict[str, Mapping[str, Any]] = {name: {} for name in ESTIMATORS}
    keys |= {**OTHERS, **{name: {} for name in WITH_MECHANISM}, "hicra": {"grams": [[5], [6, 7]]}}
    keys |= {**WITH_CRITIC, **WITH_TURN_CRITIC, **WITH_TOLD_CRITIC, "duration_aware": {}, "two_level": {}}
    pages = {FIRST: (FIRST, "ppo_clip"), "guided": ("guided", "luffy")}
    found = [
        arm(name, {**clipped, "advantage": {"kind": name, **more}, **ESTIMATOR_STAGES.get(name, {})}, pages.get(name))
        for name, more in keys.items()
    ]
    losses = [name for name in ("reinforce", *OTHER_LOSSES, "min_entropy") if name != "luffy"]
    found += [arm(name, LOSS_STAGES.get(name) or stage_of_loss(name)) for name in losses]
    return found + [arm(label, {**clipped, **stage}, (page,)) for label, (page, stage) in AROUND.items()]


def arm(label: str, stage: Mapping[str, Any], pages: Sequence[str] | None = None) -> Arm:
    keys = {key: value for key, value in stage.items() if key not in ("steps", "rewards")}
    return Arm(label, keys, pages or (label,), stage.get("rewards", TASK["rewards"]), NOTES.get(label, ""))


# --- runs -------------------------------------------------------------------------------------------------------------


def run(arm: Arm, seed: int, out: Path) -> Curve:
    """Train one arm with one seed until its budget is spent, unless that is done already."""
    name = re.sub(r"\W+", "-", arm.label)
    folder, result = out / f"{name}-seed{seed}", out / f"{name}-seed{seed}.json"
    if not result.is_file():
        stage = {**POLICY_GRADIENT, **arm.stage}
        if arm.label == "kdrl":
            stage["loss"] = {**stage["loss"], "teacher": str(policy_of("teacher", seed, out))}
        task = {**task_of(arm.label), "rewards": arm.rewards}
        recipe = recipe_of("algorithms", seed, policy_of("start", seed, out, task["agent"]), stage, task)
        begun = time.perf_counter()
        curve = until_spent(begin(recipe, folder), folder, curve_of, lambda curve: curve.steps, BUDGET)
        time_s = time.perf_counter() - begun
        print(f"{folder.name}: {curve.area(BUDGET):.1%} in {time_s:.0f} s", file=sys.stderr, flush=True)
        result.write_text(json.dumps({"steps": curve.steps, "success": curve.success, "time_s": time_s}))
        shutil.rmtree(folder)
    found = json.loads(result.read_text())
    return Curve(found["steps"], found["success"])


def task_of(label: str) -> Mapping[str, Any]:
    """Return the keys of a recipe that say what the task is, and who acts in it."""
    return {**TASK, "agent": AGENTS.get(label, TASK["agent"])}


def recipe_of(
    name: str, seed: int, start: Path, stage: Mapping[str, Any], task: Mapping[str, Any] = TASK
) -> Mapping[str, Any]:
    """Return the recipe of a run from the policy in `start`, measured on the same tasks while it trains and after."""
    measured = {"split": "test", "n_tasks": N_TASKS, "validation_split": "test", "validation_n_tasks": N_TASKS}
    policy = {"kind": "pretrained", "path": str(start)}
    evaluation = {**measured, "allow_overlap": True}
    return {**task, "name": name, "seed": seed, "policy": policy, "evaluation": evaluation, "stages": [stage]}


def policy_of(
    name: str,
    seed: int,
    out: Path,
    agent: Mapping[str, Any] = TASK["agent"],
    world: Mapping[str, Any] | None = None,
) -> Path:
    """Return the folder of the weak policy that every run of `seed` starts from, or of its teacher; made once.

    `world` has keys of its recipe in the place of those of `TASK` and `SUPERVISED`.
    """
    folder = out / (f"{name}-seed{seed}" if agent == TASK["agent"] else f"{name}-{agent['kind']}-seed{seed}")
    if not (folder / "result.json").is_file():
        policy = MODEL if name == "start" else {"kind": "pretrained", "path": str(policy_of("start", seed, out))}
        stage = SUPERVISED if name == "start" else TEACHER
        values = {"name": name, "seed": seed, "policy": policy, "stages": [stage]}
        process = begin({**TASK, "agent": agent, **values, **(world or {})}, folder)
        process.join()
        if process.exitcode:
            raise SystemExit(f"{folder} could not be made; see {folder.with_suffix('.log')}")
    [path] = [p for p in (folder / "checkpoints").glob("*/policy") if not p.parent.name.endswith("-000000")]
    return path.resolve()


def begin(recipe: Mapping[str, Any], folder: Path) -> Any:
    """Train in a process that is forked, so that nothing is imported twice; what was left of an earlier try is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(json.loads(json.dumps(recipe)), sort_keys=False))
    process = multiprocessing.get_context("fork").Process(target=_train, args=(path, folder), daemon=True)
    process.start()
    return process


def _train(path: Path, folder: Path) -> None:
    torch.set_num_threads(1)  # models this small gain nothing from more, and one gives the same curve on every machine
    with folder.with_suffix(".log").open("w") as log:
        train(load(path), folder, console=CleanConsole(file=log, width=120))


def until_spent(
    process: Any, folder: Path, read: Callable[[Path], T], spent: Callable[[T], Sequence[float]], budget: float
) -> T:
    """Wait until a run was measured after its budget was spent, and end it then.

    Args:
        process: of the run.
        folder: of the run.
        read: finds what the run has measured so far.
        spent: of that, how much had been spent at each measurement.
        budget: of each run, in the same unit.
    """
    try:
        while process.is_alive():
            found = read(folder)
            if any(n >= budget for n in spent(found)[-1:]):
                return found
            process.join(0.3)
        raise SystemExit(f"{folder} ended before its budget was spent; see {folder.with_suffix('.log')}")
    finally:
        process.kill()
        process.join()


# --- what is written --------------------------------------------------------------------------------------------------


def loss_of(arm: Arm) -> str:
    return str(arm.stage.get("loss", {}).get("kind", "ppo_clip"))


def advantage_of(arm: Arm) -> str:
    return str(arm.stage.get("advantage", {}).get("kind", "grpo"))


def shares(values: Sequence[float]) -> str:
    """Their mean with its 95% interval over the seeds; one seed has none."""
    return share(mean_interval(values)) if len(values) > 1 else f"{values[0]:.1%}"


def more(curves: Sequence[Curve], first: Sequence[Curve]) -> str:
    """By how many points mean success differs, seed by seed, with the interval."""
    differences = [a.area(BUDGET) - b.area(BUDGET) for a, b in zip(curves, first, strict=True)]
    return points(mean_interval(differences)) if len(differences) > 1 else f"{100 * differences[0]:+.1f}"


def row(arm: Arm, curves: Sequence[Curve], first: Sequence[Curve]) -> str:
    """Return one row of the table; `first` are the runs of the same seeds that it is compared with."""
    names = f"[{arm.label}]({arm.pages[0]}.md) | `{advantage_of(arm)}` | `{loss_of(arm)}`"
    mean, last = shares([c.area(BUDGET) for c in curves]), shares([c.at([BUDGET])[0] for c in curves])
    return f"| {names} | {mean} | {'' if curves is first else more(curves, first)} | {last} |"


def sentence(arm: Arm, curves: Sequence[Curve], first: Sequence[Curve]) -> str:
    """Say what was measured, for the page of the algorithm."""
    begun, ends = ([curve.at([step])[0] for curve in curves] for step in (0, BUDGET))
    name = "" if arm.pages[0] in (advantage_of(arm), loss_of(arm)) else f"`{arm.label}`, "
    mean = shares([c.area(BUDGET) for c in curves])
    said = f"{name}`{advantage_of(arm)}` with `{loss_of(arm)}`: mean success **{mean}**"
    if curves is not first:
        said += f", {more(curves, first)} points relative to `{FIRST}`"
    said += f"; {sum(begun) / len(begun):.0%} at the start, {shares(ends)} at the end."
    gains = [b - a for a, b in zip(begun, ends, strict=True)]
    if len(gains) > 1 and mean_interval(gains).low <= 0:
        said += " The end is not significantly above the start."
    return f"- {said} {arm.note}".rstrip()


def write(found: Mapping[str, Sequence[Curve]], n_seeds: int) -> None:
    """Put the table and the sentences into the pages."""
    first, known = found[FIRST], [arm for arm in arms() if arm.label in found]
    where = f"[Keyhole](measured.md), {n_seeds} seeds, 95% intervals:"
    for page in {page for arm in known for page in arm.pages}:
        lines = [sentence(arm, found[arm.label], first) for arm in known if page in arm.pages]
        write_between(PAGES / f"{page}.md", MARKS, "\n".join([where, "", *lines, ""]))
    write_between(PAGES / "measured.md", MARKS, f"{table(known, found)}\n")


def table(known: Sequence[Arm], found: Mapping[str, Sequence[Curve]]) -> str:
    first = found[FIRST]
    names = f"| | estimator | loss | mean success over the budget | points more than {FIRST} | success at its end |"
    return "\n".join([names, "|---|---|---|---|---|---|", *(row(arm, found[arm.label], first) for arm in known)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", default=[FIRST, "gigpo", "reinforce"], help="labels of the table, or all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--write", action="store_true", help="into the pages")
    settings = parser.parse_args()
    if unknown := {*settings.arms} - {"all", *(arm.label for arm in arms())}:
        parser.error(f"no such label: {', '.join(sorted(unknown))}; there are {', '.join(arm.label for arm in arms())}")
    if settings.write and "all" not in settings.arms:
        parser.error("--write replaces the whole table: name all")
    settings.out.mkdir(parents=True, exist_ok=True)
    asked = [arm for arm in arms() if "all" in settings.arms or arm.label in (*settings.arms, FIRST)]
    done = {(arm.label, seed): run(arm, seed, settings.out) for seed in settings.seeds for arm in asked}
    found = {arm.label: [done[arm.label, seed] for seed in settings.seeds] for arm in asked}
    print(table(asked, found))
    if settings.write:
        write(found, len(settings.seeds))


if __name__ == "__main__":
    main()
