"""Methods with what they are about beside GRPO: per-turn rewards, a told critic, a warm critic, logits as Q-values.

    python benchmarks/mechanisms.py                                   # all, one seed
    python benchmarks/mechanisms.py step_grpo shiq --seeds 0 1 2
    python benchmarks/mechanisms.py shiq --arm 'β 1={advantage: {kind: dr_grpo}, loss: {kind: shiq, beta: 1.0}}'

Task, start, measure and budget are those of `benchmarks/algorithms.py`, which tunes nothing; here each method has keys
that suit it, and a world of `benchmarks/mechanism_worlds.py` where keyhole lacks what it is about. Every run leaves a
file under `--out` and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from algorithms import POLICY_GRADIENT, ROOT, TASK, begin, policy_of, recipe_of, until_spent
from credit import Curve, curve_of, row
from trees import WORLDS

_OUTCOME: Mapping[str, Any] = {"success": {"kind": "outcome"}}
_TURNS: Mapping[str, Any] = {"nearer": {"kind": "environment"}}
#: Four updates of the same samples, with which `benchmarks/algorithms.py` measures what needs no other number.
_FOUR: Mapping[str, Any] = {"minibatches": 2, "epochs": 2}
_GRPO: Mapping[str, Any] = {**_FOUR, "advantage": {"kind": "grpo"}}


@dataclass(frozen=True)
class Study:
    """One method in its world.

    Attributes:
        arms: label -> what it changes in `POLICY_GRADIENT`, and `rewards` of the recipe. The first is what the others
            are compared with.
        task: keys of a recipe that say what the task is.
        budget: environment steps of each run.
        imitated: keys of the recipe of the start in the place of those of `benchmarks/algorithms.py`.
    """

    arms: Mapping[str, Mapping[str, Any]]
    task: Mapping[str, Any] = field(default_factory=lambda: TASK)
    budget: int = 4_000
    imitated: Mapping[str, Any] | None = None


def keyhole(world: str) -> Mapping[str, Any]:
    """Return the keys of a recipe for keyhole as a class of `mechanism_worlds.py`."""
    return {**TASK, "environment": {**TASK["environment"], "kind": f"{WORLDS}:{world}"}}


_RENEWED: Mapping[str, Any] = {"reference_reset": {"every": 4, "reset_optimizer": False}}


def shiq(beta: float, **stage: Any) -> Mapping[str, Any]:
    """Return a stage of ShiQ that makes two updates in a step."""
    return {
        "advantage": {"kind": "dr_grpo"},
        "loss": {"kind": "shiq", "beta": beta},
        "reduction": {"kind": "seq_mean_token_sum"},
        "filters": {"drop_zero_advantage": False},
        "minibatches": 2,
        **stage,
    }


#: A critic of turns learns before the policy moves, slowly: its first advantages are noise.
_ARCHER: Mapping[str, Any] = {
    "tasks_per_step": 64, "group_size": 1, "advantage": {"kind": "archer"}, "loss": {"kind": "reinforce"},
    "critic": {
        "kind": "archer", "updates_per_step": 20, "batch_size": 32, "bootstrap": False, "warmup_steps": 5,
        "optimizer": {"lr": 1e-3},
    },
}  # fmt: skip


def told(text: str = "{reference}. ") -> Mapping[str, Any]:
    """Return a stage of SWEET whose critic is told `text`."""
    critic = {"warmup_steps": 2, "epochs": 12, "beta": 1.0, "optimizer": {"lr": 3e-3}}
    return {**_FOUR, "advantage": {"kind": "sweet"}, "critic": {"kind": "sweet", "privileged_text": text, **critic}}


def oreal(critic: Mapping[str, Any] | None = None, **keys: Any) -> Mapping[str, Any]:
    """Return a stage of OREAL: one update in a step, since cloning has nothing that holds it."""
    found = {"advantage": {"kind": "oreal", **keys}, "loss": {"kind": "reinforce", "kl": "k3", "kl_coef": 0.01}}
    return found if critic is None else {**found, "critic": critic}


#: Tokens tell little before some hundred attempts are read.
_TOKENS: Mapping[str, Any] = {"kind": "token_rewards", "warmup_steps": 4, "head_lr": 1e-3}

#: Two words that are shown one after the other, as the tests of learning have them, and their start and policy.
WORDS: Mapping[str, Any] = {
    **TASK, "environment": {"kind": f"{ROOT / 'tests/training/words.py'}:Words"},
    "limits": {"max_turns": 3, "max_tokens": 6},
}  # fmt: skip
SPOILT: Mapping[str, Any] = {
    "kind": "supervised", "n_demonstrations": 256, "random_share": 0.7, "epochs": 12, "batch_size": 16,
    "optimizer": {"lr": 5e-3},
}  # fmt: skip
SMALL: Mapping[str, Any] = {
    "kind": "from_scratch", "hidden_size": 32, "n_layers": 1, "n_heads": 2, "head_dim": 16, "max_context": 128,
    "vocab_size": 400, "initializer_range": 0.1,
}  # fmt: skip


def of_words(stage: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a stage with the rates and rewards of the tests of learning."""
    return {**stage, "tasks_per_step": 8, "optimizer": {"lr": 4e-3}, "rewards": {"words": {"kind": "environment"}}}


STUDIES: Mapping[str, Study] = {
    "step_grpo": Study(
        {
            "grpo": _GRPO,
            "grpo, sum of turns": {**_GRPO, "rewards": _TURNS},
            "step_grpo": {**_FOUR, "advantage": {"kind": "step_grpo"}, "rewards": _TURNS},
        },
        keyhole("Nearer"),
    ),
    "shiq": Study(
        {
            "grpo": _GRPO,
            "β 0.03, 4 updates": shiq(0.03, epochs=2),
            "β 0.03": shiq(0.03),
            "β 0.3": shiq(0.3),
            "β 0.3, renewed": shiq(0.3, **_RENEWED),
        }
    ),
    "sweet": Study(
        {"grpo": of_words(_GRPO), "told": of_words(told()), "untold": of_words(told(""))},
        WORDS,
        2_000,
        {**WORDS, "policy": SMALL, "stages": [SPOILT]},
    ),
    "sweet_keyhole": Study({"grpo": _GRPO, "told": told(), "untold": told("")}, keyhole("Told")),
    "archer": Study({"grpo": _GRPO, "archer": _ARCHER}, budget=12_000),
    "oreal": Study({"grpo": _GRPO, "oreal": oreal(), "token rewards": oreal(_TOKENS, weights="critic")}),
}


def run(name: str, study: Study, label: str, seed: int, out: Path) -> Curve:
    """Train one arm with one seed until its budget is spent, unless that is done already."""
    # GRPO with the outcome alone is the same run in all studies of keyhole.
    shared = study.arms[label] == _GRPO
    folder = out / f"{'' if shared else name + '-'}{re.sub(r'[^0-9a-zA-Z]+', '-', label)}-{study.budget}-seed{seed}"
    result = folder.parent / f"{folder.name}.json"
    if not result.is_file():
        arm = dict(study.arms[label])
        task = {**(TASK if shared else study.task), "rewards": arm.pop("rewards", _OUTCOME)}
        starts = out / name if study.imitated else out
        starts.mkdir(exist_ok=True)
        start = policy_of("start", seed, starts, world=study.imitated)
        recipe = recipe_of("mechanisms", seed, start, {**POLICY_GRADIENT, **arm}, task)
        begun = time.perf_counter()
        curve = until_spent(begin(recipe, folder), folder, curve_of, lambda curve: curve.steps, study.budget)
        time_s = time.perf_counter() - begun
        print(f"{folder.name}: {curve.area(study.budget):.1%} in {time_s:.0f} s", file=sys.stderr, flush=True)
        result.write_text(json.dumps({"steps": curve.steps, "success": curve.success, "time_s": time_s}))
        shutil.rmtree(folder)
    found = json.loads(result.read_text())
    return Curve(found["steps"], found["success"])


def table(study: Study, found: Mapping[str, Sequence[Curve]]) -> str:
    """Return the table of a study in Markdown."""
    first = next(iter(found))
    ends = "success at its end | points above the start"
    title = f"| | mean success over the budget | points more than {first} | {ends} |"
    rows = [row(label, curves, found[first], study.budget) for label, curves in found.items()]
    return "\n".join([title, "|---|---|---|---|---|", *rows])


def main() -> None:
    """Run every arm of the studies with every seed, and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", default=list(STUDIES), help=", ".join(STUDIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arm", action="append", default=[], help="LABEL={keys}: in the place of a study's own")
    parser.add_argument("--out", type=Path, default=Path("runs/mechanisms"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.studies:
        study = STUDIES[name]
        if given.arm:
            others = dict(text.split("=", 1) for text in given.arm)
            arms = {label: study.arms.get(label) or yaml.safe_load(keys) for label, keys in others.items()}
            study = replace(study, arms={next(iter(study.arms)): next(iter(study.arms.values())), **arms})
        found: dict[str, list[Curve]] = {label: [] for label in study.arms}
        for seed in given.seeds:
            for label in study.arms:
                found[label].append(run(name, study, label, seed, given.out))
        print(f"{name}, {study.budget:,} environment steps\n\n{table(study, found)}\n", flush=True)


if __name__ == "__main__":
    main()
