"""Proof of learning: suites by chance, open loop, oracle, the untrained base, imitation, and reinforcement after it.

    OMP_NUM_THREADS=1 python benchmarks/proof.py                                  # all that is left: days of two cores
    python benchmarks/proof.py --suites keyhole --arms untrained rl --seeds 0     # one suite, two arms, one seed
    python benchmarks/proof.py --list                                             # what is left, and nothing is run
    python benchmarks/proof.py --page docs/proof.md                               # write the table into the page

A row is a suite, an arm and a seed. It is appended to --rows with the commit, the time and the number of tasks once it
is measured, and is not measured again but with more tasks (--n) or for another base, so the command may be stopped and
given again for days. Runs and evaluations lie under --out; one that was interrupted goes on.

All arms with a policy have one agent, without a system message and without lists of actions. Stages are those of the
recipe `base/learn`: `untrained` has none, `imitated` the first, which imitates oracles, and `rl` goes on from there
with the second, which plays. Agent and limits are those of `settings_of`, by what kind of world it is and never by its
name.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import open_loop
import yaml
from pages import write_between

from rlhf.build.evaluate import evaluate
from rlhf.errors import RlhfError
from rlhf.evaluation.statistics import mean_interval
from rlhf.recipe.builder import plain_part
from rlhf.recipe.evaluation_request import EvaluationRequest
from rlhf.recipe.rewards import plain_rewards
from rlhf.recipe.suites import Suite, list_suites, load_suite
from rlhf.stats import share_interval
from rlhf.training.checkpoints.store import every

ARMS = ("random", "open_loop", "oracle", "untrained", "imitated", "rl")
#: Arms that draw nothing but what the suite draws: one row is all there is.
ONCE = ("random", "open_loop", "oracle", "untrained")
WITHOUT_BASE = ("random", "open_loop", "oracle")
MARKS = "<!-- proof: written by benchmarks/proof.py -->", "<!-- end of proof -->"
#: Mark of a suite that was measured with an earlier edition of the base.
EARLIER = " †"
#: Demonstrations, then reinforcement, with settings that no world has of its own.
LEARN = Path(__file__).resolve().parent.parent / "recipes" / "base" / "learn.yaml"
#: Training tasks of environments that draw them by seed.
N_TRAIN = 10_000
#: Demonstrations that SFT imitates, as all rows were measured; the recipe `base/learn` has twice as many.
N_DEMONSTRATIONS = 4096
#: Suites with more turns than this have fewer attempts at once, a shorter memory, so that episodes fit into the context
#: of the base, and half as many demonstrations and steps of RL, since each takes several times as long.
LONG_TURNS = 40
#: Most tokens of a reply where the suite has room for thoughts, which the base does not write.
MAX_TOKENS_NO_THINKING = 128


@dataclass(frozen=True)
class Row:
    """What one arm came to on one suite.

    Attributes:
        each: most tasks of a part; None where all were asked for.
        n: tasks, of all parts.
        success, low, high: share of tasks solved, with its 95% interval.
        score: mean of the suite's rewards; success again where these are the outcome.
        parts: success of each part.
        seconds: of what was still to be done: training, and the evaluation.
        base: first digits of the SHA-256 of the base's weights; empty where there is no base.
    """

    suite: str
    arm: str
    seed: int
    each: int | None
    n: int
    success: float
    low: float
    high: float
    score: float
    parts: Mapping[str, float]
    seconds: float
    commit: str
    base: str
    at: str

    @property
    def key(self) -> tuple[str, str, int]:
        """What is not measured twice."""
        return self.suite, self.arm, self.seed


def settings_of(suite: Suite) -> dict[str, Any]:
    """Agent and limits of the base in a suite, by its turns, its lists of actions, and whether its agents may think."""
    turns = most_turns(suite)
    listed = all(getattr(part.agent, "show_admissible", False) for part in suite.parts)
    own: Any = suite.parts[0].agent
    may_think = any(getattr(part.agent, "think", "off") != "off" for part in suite.parts)
    longest = min(part.limits.max_tokens for part in suite.parts)
    longest = min(longest, MAX_TOKENS_NO_THINKING) if may_think else longest
    memory = {"memory": {"kind": "window", "turns": 4, "block": 8}} if turns > LONG_TURNS else {}
    formats = {} if own.format == "plain" else {"format": own.format}
    return {
        "agent": {"kind": "chat", "system": "", "max_action_chars": own.max_action_chars, **formats, **memory},
        "limits": {
            "max_turns": turns,
            "max_tokens": 32 if listed else longest,
            "max_concurrent": 64 if turns <= LONG_TURNS else 32,
        },
    }


def most_turns(suite: Suite) -> int:
    """Largest turn limit of a suite's parts."""
    return max(part.limits.max_turns for part in suite.parts)


def recipe_of(suite: Suite, arm: str, seed: int, policy: str = "base") -> dict[str, Any]:
    """The recipe of an arm: the parts of a suite as the levels of one environment, and a stage of `base/learn`."""
    parts = [training_part(part.environment) for part in suite.parts]
    learn = yaml.safe_load(LEARN.read_text("utf-8"))
    supervised, played = learn["stages"]
    supervised["n_demonstrations"] = N_DEMONSTRATIONS
    if most_turns(suite) > LONG_TURNS:
        supervised["n_demonstrations"] //= 2
        played["steps"] //= 2
    return {
        "name": f"proof-{suite.name}-{arm}",
        "seed": seed,
        "policy": {"kind": "pretrained", "path": policy},
        "environment": parts[0] if len(parts) == 1 else {"kind": "graded", "levels": parts},
        "rewards": {"invalid": learn["rewards"]["invalid"], **plain_rewards(suite.parts[0].rewards)},
        "evaluation": {"n_tasks": 8},
        **settings_of(suite),
        "stages": [supervised if arm == "imitated" else played],
    }


def training_part(environment: Any) -> dict[str, Any]:
    """Keys of an environment, with more training tasks where they are drawn by seed: the base has seen the first."""
    keys = plain_part("environment", environment)
    if getattr(environment, "n_train", N_TRAIN) < N_TRAIN:
        keys["n_train"] = N_TRAIN
    return keys


def measured(suite: Suite, arm: str, seed: int, asked: argparse.Namespace) -> Row:
    """Train where the arm is trained, evaluate, and return the row. Raises RlhfError, or CalledProcessError."""
    begun = time.monotonic()
    weights = "" if arm in WITHOUT_BASE else base_digest()
    out: Path = asked.out
    name = "-".join([suite.name, arm, f"seed{seed}", *([weights] if weights else [])])
    target, checkpoint = arm, None
    if weights:
        target, checkpoint = prepared(suite, arm, seed, out)
    if arm == "open_loop":
        row = open_loop_row(suite, asked.n)
        return replace(row, seconds=round(time.monotonic() - begun, 1), commit=commit(asked.rows))
    of = EvaluationRequest(target=target, checkpoint=checkpoint, suite=suite.name, n=asked.n)
    found = evaluate(of, out=out / f"{name}-evaluation-{asked.n or 'all'}")
    own = found["success"]
    return Row(
        suite=suite.name,
        arm=arm,
        seed=seed,
        each=asked.n,
        n=found["n_tasks"],
        success=round(own["value"], 4),
        low=round(own["low"], 4),
        high=round(own["high"], 4),
        score=round(found["score"]["value"], 4),
        parts={part: round(figures["success"]["value"], 4) for part, figures in found["parts"].items()},
        seconds=round(time.monotonic() - begun, 1),
        commit=commit(asked.rows),
        base=weights,
        at=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    )


def open_loop_row(suite: Suite, most: int | None) -> Row:
    """What the best sequence of actions that looks at no reply comes to; see `open_loop.py`."""
    parts = open_loop.measured(suite.name, most)
    n_solved, n = sum(found.n_solved for found in parts.values()), sum(found.n for found in parts.values())
    low, high = share_interval(n_solved, n)
    return Row(
        suite=suite.name,
        arm="open_loop",
        seed=0,
        each=most,
        n=n,
        success=round(n_solved / n, 4),
        low=round(low, 4),
        high=round(high, 4),
        score=round(n_solved / n, 4),
        parts={part: round(found.n_solved / found.n, 4) for part, found in parts.items()},
        seconds=0.0,
        commit="",
        base="",
        at=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    )


def prepared(suite: Suite, arm: str, seed: int, out: Path) -> tuple[str, str | None]:
    """Recipe of an arm, and the checkpoint that it is trained to: begun, gone on with, or there; None if untrained."""
    policy = "base"
    if arm == "rl":
        policy = str(Path(prepared(suite, "imitated", seed, out)[1] or "") / "policy")
    run = (out / f"{suite.name}-{arm}-seed{seed}-{base_digest()}").resolve()
    recipe = run.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump(recipe_of(suite, arm, seed, policy), sort_keys=False))
    if arm == "untrained":
        return str(recipe), None
    return str(recipe), str(trained(recipe, run))


def trained(recipe: Path, run: Path) -> Path:
    """Newest checkpoint of a run that is finished, resumed or started. Raises CalledProcessError if training fails."""
    if not (run / "result.json").is_file():
        words = ["--resume", str(run)] if (run / "recipe.yaml").is_file() else [str(recipe), "--out", str(run)]
        with run.with_suffix(".log").open("ab") as log:
            subprocess.run([sys.executable, "-m", "rlhf.cli", "train", *words], stdout=log, stderr=log, check=True)
    return every(run / "checkpoints")[-1]


def base_digest(folder: str = "base") -> str:
    """First digits of the SHA-256 of the base's weights, or of another model's."""
    import hashlib

    from rlhf.training.policy.model_files import base_or

    return hashlib.sha256((Path(base_or(folder)) / "model.safetensors").read_bytes()).hexdigest()[:12]


def commit(rows: Path) -> str:
    """Short name of the commit, with a + where more than the rows differs from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent.parent)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!docs/{rows.name}")
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


def read(path: Path) -> list[Row]:
    """Rows that are measured, oldest first."""
    return [Row(**values) for values in json.loads(path.read_text("utf-8"))] if path.is_file() else []


def write(path: Path, rows: Sequence[Any]) -> None:
    """Write all rows, which are dataclasses, a line each, whole or not at all."""
    partial = path.with_suffix(".partial")
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    partial.write_text(f"[\n{lines}\n]\n", "utf-8")
    partial.rename(path)


def of_present_base(rows: Sequence[Row]) -> list[Row]:
    """Rows without a base, and those of the one that lies here."""
    weights = base_digest()
    return [row for row in rows if row.base in ("", weights)]


def of_newest_base(rows: Sequence[Row], weights: str) -> list[Row]:
    """Rows of the base that lies here; of a suite that has none, those of the base before it, its name marked."""
    there = {row.suite for row in rows if row.base == weights}
    found = [row for row in rows if row.base in ("", weights) or row.suite not in there]
    old = {row.suite for row in found if row.base not in ("", weights)}
    return [replace(row, suite=row.suite + EARLIER) if row.suite in old else row for row in found]


def left(asked: argparse.Namespace, rows: Sequence[Row]) -> Iterator[tuple[str, str, int]]:
    """Suite, arm and seed of what is not measured yet; cheap arms first."""
    rows = of_present_base(rows)
    there = {row.key for row in rows if row.each is None or (asked.n is not None and row.each >= asked.n)}
    for arm in (arm for arm in ARMS if arm in asked.arms):
        for seed in asked.seeds[:1] if arm in ONCE else asked.seeds:
            yield from ((name, arm, seed) for name in asked.suites if (name, arm, seed) not in there)


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown: a line for each suite, a column for each arm."""
    lines = ["| suite | " + " | ".join(ARMS) + " | RL over SFT | learnt |", "|---|" + "---|" * (len(ARMS) + 2)]
    for name in dict.fromkeys(row.suite for row in sorted(rows, key=lambda row: row.suite)):
        of_arm = {arm: [row for row in rows if (row.suite, row.arm) == (name, arm)] for arm in ARMS}
        cells = [cell(found) for found in of_arm.values()]
        lines.append(f"| {name} | {' | '.join(cells)} | {gain(of_arm)} | {learnt(of_arm)} |")
    return "\n".join(lines) + "\n"


def cell(rows: Sequence[Row]) -> str:
    """Success of an arm: mean of its seeds, and `pooled` bounds."""
    if not rows:
        return "not measured"
    mean, low, high = pooled(rows)
    seeds = f", {len(rows)} seeds" if len(rows) > 1 else ""
    tasks = " to ".join(map(str, sorted({min(row.n for row in rows), max(row.n for row in rows)})))
    return f"{mean:.1%} ({low:.1%} to {high:.1%}; {tasks} tasks{seeds})"


def pooled(rows: Sequence[Row]) -> tuple[float, float, float]:
    """Mean success, and the lowest low and the highest high that a seed had: seeds share their tasks."""
    return statistics.mean(row.success for row in rows), min(r.low for r in rows), max(r.high for r in rows)


def gain(of_arm: Mapping[str, Sequence[Row]]) -> str:
    """What reinforcement adds to imitation, points, paired by seed, with its 95% interval over seeds."""
    imitated = {row.seed: row.success for row in of_arm["imitated"]}
    gains = [100 * (row.success - imitated[row.seed]) for row in of_arm["rl"] if row.seed in imitated]
    if len(gains) < 2:
        return ""
    found = mean_interval(gains)
    return f"{found.value:+.1f} ({found.low:+.1f} to {found.high:+.1f})"


def learnt(of_arm: Mapping[str, Sequence[Row]]) -> str:
    """Whether reinforcement is above chance and above the untrained base, intervals apart, on three seeds."""
    if not of_arm["rl"] or not of_arm["random"] or not of_arm["untrained"]:
        return ""
    bar = max(pooled(of_arm[arm])[2] for arm in ("random", "untrained"))
    n = sum(row.low > bar for row in of_arm["rl"])
    found = f"{'yes' if n == len(of_arm['rl']) >= 3 else 'no'}, {n} of {len(of_arm['rl'])} seeds"
    is_above = all(row.low > one.high for row in of_arm["rl"] for one in of_arm["open_loop"])
    return found if is_above or found.startswith("no") else f"{found}, but not above open loop"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [one.name for one in list_suites()]
    parser.add_argument("--suites", nargs="+", default=known, choices=known)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--n", type=int, help="at most so many tasks of each part; all of them where nothing is said")
    parser.add_argument("--out", type=Path, default=Path("runs") / "proof")
    parser.add_argument("--rows", type=Path, default=Path(__file__).resolve().parent.parent / "docs" / "proof.json")
    parser.add_argument("--list", action="store_true", help="say what is left, and run nothing")
    parser.add_argument("--page", type=Path, help=f"write the table after the line {MARKS[0]} of this page")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.page is not None:
        write_between(asked.page, MARKS, table(of_newest_base(read(asked.rows), base_digest())))
        return
    for name, arm, seed in list(left(asked, read(asked.rows))):
        print(name, arm, seed, flush=True)
        if asked.list:
            continue
        try:
            row = measured(load_suite(name), arm, seed, asked)
        except (RlhfError, subprocess.CalledProcessError) as error:
            print(f"{name} {arm} {seed}: {error}", file=sys.stderr, flush=True)
            continue
        write(asked.rows, [*(one for one in read(asked.rows) if one.key != row.key), row])
        print(f"  {row.success:.1%} ({row.low:.1%} to {row.high:.1%}), {row.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
