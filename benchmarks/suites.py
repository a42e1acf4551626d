"""Success of chance, oracles and a small model before and after training, on every suite.

    OMP_NUM_THREADS=1 python benchmarks/suites.py                          # all of them: hours on a shared core
    python benchmarks/suites.py --suites keyhole babyai --policies random oracle
    python benchmarks/suites.py --page docs/suite_baselines.md            # and write the tables into the page

Everything lies in --out: an evaluation for each suite and policy, and for each suite a run. What is there is not made
again, and what was interrupted goes on, so the command may be stopped and given again, and again when suites are added.
Rows of the page stay where nothing newer is in --out.

`trained` is a small model made from scratch: by a recipe that comes along where RECIPES names one, else by a short one
for the suite's own parts, in which 0.3 million parameters imitate at most 1,000 demonstrations and play 2 to 5 steps of
GiGPO. `untrained` is the same model before its first update. They show what a figure of a suite means, and not how far
one could get.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pages import write_between

from rlhf.build.evaluate import evaluate
from rlhf.commands.evaluate import recipe_and_checkpoint
from rlhf.errors import RlhfError
from rlhf.evaluation.contrib.leaderboard import boards, table_of, title_of
from rlhf.recipe import list_recipes
from rlhf.recipe.builder import plain_part
from rlhf.recipe.evaluation_request import EvaluationRequest
from rlhf.recipe.rewards import plain_rewards
from rlhf.recipe.suites import Suite, list_suites, load_suite

POLICIES = ("random", "oracle", "untrained", "trained")
#: The checkpoint before the first update of a run.
FIRST = Path("checkpoints") / "0-supervised-000000"
BEGIN, END = "<!-- leaderboard: written by benchmarks/suites.py -->", "<!-- end of leaderboard -->"

#: Suite -> the recipe whose policy is `trained`: it learns one part, from the training split, and is judged on all.
RECIPES = {
    "quick": "quickstart",
    "babyai": "quickstart",
    "graded": "quickstart",
    "keyhole": "keyhole-gigpo",
    "textworld_express": "coin-gigpo",
}

#: Suite -> the suite whose small model is judged by it, because it has nothing to train on itself.
LENT = {"bfcl": "tools"}

#: Suite -> tokens of a reply, where its actions are longer than a few words.
REPLIES = {
    "collaborate": 32,
    "countdown": 24,
    "knights_and_knaves": 48,
    "reasoning_gym": 24,
    "shop": 24,
    "text_to_sql": 64,
    "tools": 64,
    "twenty_questions": 24,
}
REPLY = 12
#: Turns that the demonstrations of a suite may have together: short episodes are shown more often than long ones.
TURNS = 8000
#: Suite -> demonstrations, where each takes seconds to plan.
SHOWN = {"scienceworld": 60}
#: Suite -> share of random actions in its demonstrations, so that what follows a mistake is shown too: an oracle solves
#: a puzzle at its first attempt, and nobody would have seen a second one.
STRAYS = {"countdown": 0.3, "knights_and_knaves": 0.3, "sat": 0.3}
#: The share elsewhere, where actions are chosen. Where they are written it is 0: few that could be drawn mean anything,
#: and what is copied from the context would be learnt worse.
STRAY = 0.1
#: Episodes with more turns than this have few steps of reinforcement learning, because each costs so much.
LONG = 16

SMALL = {"kind": "from_scratch", "hidden_size": 96, "n_layers": 2, "n_heads": 4, "vocab_size": 512, "max_context": 2048}


def recipe_of(suite: Suite) -> dict[str, Any]:
    """The recipe of the small model: the parts of a suite as the levels of one environment."""
    parts = [plain_part("environment", part.environment) for part in suite.parts]
    turns = [part.limits.max_turns for part in suite.parts]
    return {
        "name": f"small-{suite.name}",
        "policy": SMALL,
        "environment": parts[0] if len(parts) == 1 else {"kind": "graded", "levels": parts},
        "agent": {"kind": "chat", "system": ""},
        "rewards": plain_rewards(suite.parts[0].rewards),
        "limits": {
            "max_turns": max(turns),
            "max_tokens": REPLIES.get(suite.name, REPLY),
            "max_concurrent": min(part.limits.max_concurrent for part in suite.parts),
        },
        "evaluation": {"n_tasks": 20},
        "stages": stages_of(
            sum(turns) / len(turns),
            STRAYS.get(suite.name, STRAY if shown_a_list(suite) else 0.0),
            SHOWN.get(suite.name),
        ),
    }


def shown_a_list(suite: Suite) -> bool:
    """True if every part's agent chooses among shown actions; else it writes."""
    return all(getattr(part.agent, "show_admissible", False) for part in suite.parts)


def stages_of(turns: float, random_share: float, n_shown: int | None = None) -> list[dict[str, Any]]:
    """Stages of the small model, for episodes of up to `turns` turns.

    Demonstrations are `n_shown`, or as many as have about `TURNS` turns together.

    A small batch makes many updates of few demonstrations: to copy a name from the context is learnt late and at once.
    """
    return [
        {
            "kind": "supervised",
            "n_demonstrations": n_shown or int(min(max(TURNS // turns, 200), 1000)),
            "random_share": random_share,
            "observation_weight": 0.5,
            "epochs": 4,
            "batch_size": 4,
            "optimizer": {"lr": 2.0e-3, "schedule": "cosine", "warmup_steps": 20},
        },
        {
            "kind": "policy_gradient",
            "steps": 5 if turns <= LONG else 2,
            "tasks_per_step": 8,
            "group_size": 8,
            "advantage": {"kind": "gigpo"},
            "minibatches": 2,
            "optimizer": {"lr": 2.0e-4, "schedule": "linear"},
        },
    ]


def rlhf(words: Sequence[str | Path], log: Path) -> bool:
    """Run a command; whether it succeeded. What it says is in `log`."""
    with log.open("wb") as file:
        done = subprocess.run([sys.executable, "-m", "rlhf.cli", *map(str, words)], stdout=file, stderr=file)
    return done.returncode == 0


def trained(name: str, suite: Suite, out: Path) -> Path | None:
    """The run of the trained model of a suite, begun, gone on with, or there; None where it cannot be trained."""
    recipe = RECIPES.get(name, name)
    run, log = out / f"{recipe}-run", out / f"{recipe}-run.log"
    if (run / "result.json").is_file():
        return run
    words: list[str | Path] = ["--resume", run]
    if not (run / "recipe.yaml").is_file():
        if name in RECIPES:
            path = next(one.path for one in list_recipes() if one.name.rpartition("/")[2] == recipe)
        else:
            path = out / f"{name}-recipe.yaml"
            path.write_text(yaml.safe_dump(recipe_of(suite), sort_keys=False))
        words = [path, "--out", run]
    return run if rlhf(["train", *words], log) else None


def folder_of(name: str, policy: str, out: Path, n: int | None) -> Path:
    """Folder of an evaluation of at most `n` tasks of each part, or of all."""
    return out / (f"{name}-{policy}" if n is None else f"{name}-{policy}-n{n}")


def evaluated(name: str, policy: str, out: Path, n: int | None = None) -> bool:
    """Evaluate a policy on a suite, at most `n` tasks of each part, where that is not done; whether it is."""
    folder = folder_of(name, policy, out, n)
    if (folder / "summary.json").is_file():
        return True
    try:
        if policy in ("untrained", "trained"):
            learnt = LENT.get(name, name)
            run = trained(learnt, load_suite(learnt), out)
            if run is None:
                return False
            target, checkpoint = recipe_and_checkpoint(str(run / FIRST if policy == "untrained" else run), None)
            asked = EvaluationRequest(target=target, checkpoint=str(checkpoint), suite=name, n=n)
        else:
            asked = EvaluationRequest(target=policy, suite=name, n=n)
        evaluate(asked, out=folder)
    except RlhfError as error:
        print(f"{name} {policy}: {error}", file=sys.stderr, flush=True)
        return False
    return True


def tables(names: Sequence[str], out: Path, page: str = "", n: int | None = None) -> str:
    """The boards of what is there, in Markdown; rows of `page` stay where nothing newer takes their place."""
    found = [
        (policy, folder_of(name, policy, out, most)) for name in names for policy in POLICIES for most in (None, n)
    ]
    there = {str(folder): policy for policy, folder in found if (folder / "summary.json").is_file()}
    rows = written(page)
    for board in boards([Path(folder) for folder in there]):
        own = rows.setdefault(title_of(board), {})
        _, texts = table_of([{**row, "policy": there[row["folder"]]} for row in board["rows"]])
        own |= {text[0]: text for text in texts}
    lines, (columns, _) = [], table_of([])  # every task is attempted once
    for title in sorted(rows):
        lines += [f"**{title}**", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        lines += [f"| {' | '.join(row)} |" for row in sorted(rows[title].values(), key=lambda row: -share(row[1]))]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def written(page: str) -> dict[str, dict[str, list[str]]]:
    """Title of a board -> policy -> cells, as a page has them between its two marks."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in page.partition(BEGIN)[2].partition(END)[0].splitlines() if page else ():
        if line.startswith("**"):
            rows = found.setdefault(line.strip("*"), {})
        elif line.startswith("| ") and not line.startswith("| policy"):
            row = [cell.strip() for cell in line.strip("|").split("|")]
            rows[row[0]] = row
    return found


def share(text: str) -> float:
    """The number that a percentage says; what is not known comes last."""
    return float(text.rstrip("%")) if text.endswith("%") else -1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [one.name for one in list_suites()]
    parser.add_argument("--suites", nargs="+", default=known, choices=known)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--n", type=int, help="at most so many tasks of each part, for suites that take hours")
    parser.add_argument("--out", type=Path, default=Path("runs") / "suites")
    parser.add_argument("--page", type=Path, help=f"write the tables between the lines {BEGIN} and {END} of this page")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asked.out.mkdir(parents=True, exist_ok=True)
    for policy in asked.policies:
        for name in asked.suites:
            done = evaluated(name, policy, asked.out, asked.n)
            print(f"{name} {policy}: {'done' if done else 'not done'}", file=sys.stderr, flush=True)
    page = asked.page.read_text("utf-8") if asked.page is not None else ""
    shown = tables(known, asked.out, page, asked.n)
    print(shown)
    if asked.page is not None:
        write_between(asked.page, (BEGIN, END), shown)


if __name__ == "__main__":
    main()
