"""`rlhf play` and `rlhf environments`: a person at an environment, and the list of what there is."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from environments.base import properties_of
from environments.keyhole import Keyhole
from rlhf.catalog import CATALOG
from rlhf.cli import app
from rlhf.commands.environments import cells, described
from rlhf.commands.known_scores import KNOWN
from rlhf.data import Task
from tests.commands import last_json, run

DOCS = Path(__file__).resolve().parent.parent / "docs"
HOUSE = ("keyhole", "rows=3", "columns=3", "loops=4")
KEYHOLE = Keyhole(rows=3, columns=3, loops=4)

#: Names of actions that look like places in the list, no oracle, and a step that fails.
STRANGE = """
from dataclasses import dataclass
from environments.base import Properties, StepResult
from rlhf.data import Task

@dataclass(frozen=True)
class Strange:
    properties = Properties(splits=("train", "test"), isolated=ISOLATED)

    def tasks(self, split):
        return [Task(id=f"strange/{split}/{i}", seed=i) for i in range(3)]

    def start(self, task):
        return Asked(task)

class Asked:
    def __init__(self, task):
        self.opening = StepResult("Which [b]number[/b]? :smile:", admissible_actions=("2", "3", "hint"))

    async def step(self, action):
        if action == "boom":
            raise KeyError("boom")
        return StepResult("So be it.", reward=0.5, terminated=True, success=action == "2")

    async def close(self): ...
"""


def typed(*arguments: str, lines: list[str] | bytes) -> Result:
    """What `rlhf play` does when these lines are piped to it."""
    text = lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines)
    return CliRunner().invoke(app, ["play", *arguments, "--json"], input=text)


def task_of(place: int = 0) -> Task:
    return next(islice(KEYHOLE.tasks("test"), place, None))


@pytest.fixture
def strange(tmp_path: Path) -> str:
    (tmp_path / "strange.py").write_text(STRANGE.replace("ISOLATED", "False"))
    return f"{tmp_path / 'strange.py'}:Strange"


# --- play ----------------------------------------------------------------------------------------------------------


def test_typing_what_the_oracle_would_do_solves_the_task() -> None:
    plan = list(KEYHOLE.plan(task_of(), []) or ())
    done = typed(*HOUSE, lines=plan)
    record = last_json(done)
    assert record == {
        "task": task_of().id,
        "actions": plan,
        "rewards": [0.0] * (len(plan) - 1) + [1.0],
        "score": 1.0,
        "over": True,
        "truncated": False,
        "success": True,
    }
    assert KEYHOLE.start(task_of()).opening.reply in done.stdout
    assert f"[solved in {len(plan)} steps, reward 1 in all]" in done.stdout


def test_a_number_stands_for_the_action_of_the_list() -> None:
    listed = KEYHOLE.start(task_of()).opening.admissible_actions
    for i, action in enumerate(listed, 1):
        done = typed(*HOUSE, lines=[str(i)])
        assert last_json(done)["actions"] == [action]
        assert f"  {i}  {action}\n" in done.stdout


def test_questions_cost_no_step() -> None:
    first = (KEYHOLE.plan(task_of(), []) or ())[0]
    listed = KEYHOLE.start(task_of()).opening.admissible_actions
    lines = ["", "   ", "help", "state", "hint", "actions", "actions xyzzy", "0", str(len(listed) + 1), "9" * 5000]
    done = typed(*HOUSE, lines=[*lines, "quit", "north"])
    assert last_json(done)["actions"] == []
    assert f"the oracle would do: {first} (" in done.stdout
    assert done.stdout.count(f"there are actions 1 to {len(listed)}") == 3
    assert f"none of the {len(listed)} actions contains 'xyzzy'" in done.stdout
    assert "[left after 0 steps, reward 0 in all]" in done.stdout


def test_hints_lead_to_the_end_from_wherever_one_is() -> None:
    lines = ["dance", KEYHOLE.start(task_of()).opening.admissible_actions[-1]]
    plan = list(KEYHOLE.plan(task_of(), lines) or ())
    done = typed(*HOUSE, lines=[*lines, *(line for action in plan for line in ("hint", action))])
    assert last_json(done)["success"] is True
    assert "[that was not understood]" in done.stdout  # the dance, which cost a step
    left = [f"the oracle would do: {action} ({len(plan) - i} action" for i, action in enumerate(plan)]
    assert all(text in done.stdout for text in left)


def test_the_limit_of_steps_ends_the_game() -> None:
    done = typed("keyhole", "rows=4", "columns=4", "max_steps=2", lines=["dance"] * 5)
    assert last_json(done)["actions"] == ["dance"] * 2
    assert "[not solved: the limit of steps is reached after 2 steps, reward 0 in all]" in done.stdout


@settings(max_examples=12, deadline=None)
@given(st.lists(st.text(max_size=12) | st.sampled_from(["1", "2", "hint", "state", "actions"]), max_size=6))
def test_whatever_is_typed_nothing_breaks(lines: list[str]) -> None:
    for more in ([], ["--agent"]):
        done = typed(*HOUSE, *more, lines="\n".join(lines).encode(errors="replace"))
        assert done.exit_code == 0, done.output
        assert last_json(done)["success"] in (None, False)  # more than six actions lead to this door


def test_bytes_that_are_no_text_are_an_action_like_any_other() -> None:
    assert len(last_json(typed(*HOUSE, lines=b"\xff\xfe\x80\n\x00\n"))["actions"]) == 2


def test_where_nothing_is_listed_digits_are_an_answer() -> None:
    done = typed("countdown", lines=["7"])
    assert last_json(done)["actions"] == ["7"]
    assert "actions are not listed here" in done.stdout


def test_an_action_that_looks_like_a_number_or_a_question_is_taken_for_itself(strange: str) -> None:
    done = typed(strange, lines=["2"])
    assert last_json(done)["success"] is True and last_json(done)["actions"] == ["2"]
    assert "Which [b]number[/b]? :smile:\n" in done.stdout  # as it was said, not as markup
    assert last_json(typed(strange, lines=["hint"]))["actions"] == ["hint"]
    assert last_json(typed(strange, lines=["1"]))["actions"] == ["2"]


def test_an_environment_that_fails_is_told_without_a_stack_trace(strange: str) -> None:
    done = typed(strange, lines=["boom"])
    assert done.exit_code == 2
    assert "step 1 of strange/test/0: raised an exception" in done.stderr and "KeyError: 'boom'" in done.stderr
    assert "Traceback" not in done.output
    assert json.loads(done.stdout.splitlines()[-1])["error"]["type"] == "EnvError"


def test_tasks_are_named_by_id_or_by_place(strange: str) -> None:
    for named in ("4", task_of(4).id):
        assert last_json(typed(*HOUSE, "--task", named, lines=[]))["task"] == task_of(4).id
    assert last_json(typed(strange, "--split", "train", lines=[]))["task"] == "strange/train/0"
    for arguments, told in (
        (["--task", "3"], "expected: 0 to 2, or an id such as strange/test/0"),
        (["--task", "strange/test/o"], "strange/test/0"),
        (["--split", "tset"], "test"),
    ):
        done = typed(strange, *arguments, lines=[])
        assert done.exit_code == 2 and told in done.stderr


def test_the_seat_of_a_policy_shows_what_the_chat_agent_shows() -> None:
    plan = list(KEYHOLE.plan(task_of(), []) or ())
    done = typed(*HOUSE, "--agent", lines=["x" * 201, *plan])
    assert last_json(done)["actions"] == plan  # a reply that cannot be read is no step
    assert "--- system\nYou act in a text environment." in done.stdout
    assert "No action was taken: your action has 201 characters" in done.stdout
    assert done.stdout.count("--- system") == 1
    assert done.stdout.count("--- user") == len(plan) + 1  # the opening, the complaint, and all answers but the last


# --- environments --------------------------------------------------------------------------------------------------


def test_a_row_is_what_the_environment_declares() -> None:
    row = last_json(run("environments", *HOUSE, "n_test=7", "--json"))["environments"][0]
    declared = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(properties_of(KEYHOLE)).items()}
    assert row["properties"] == declared
    assert row["tasks"] == {"train": 1000, "dev": 1000, "test": 7}
    assert row["max_steps"] == KEYHOLE.max_steps
    assert "deterministic, replayable" in run("environments", *HOUSE).stdout


def test_settings_without_defaults_are_those_of_the_suite() -> None:
    row = described("objectives", ["k=2"])
    assert row["suite"] is None and row["settings"] == {"k": 2}
    row = described("graded", [])
    assert row["suite"] == "graded, levels" and len(row["settings"]["levels"]) == 3
    assert described("openenv", [])["needs"] == "url"


def test_a_kind_that_is_none_is_told_the_nearest() -> None:
    done = run("environments", "keyhloe")
    assert done.exit_code == 2 and "keyhole" in done.stderr and "Traceback" not in done.output


@pytest.mark.parametrize("isolated", ["False", "True"])
def test_measures_are_made_in_a_process_of_its_own(isolated: str, tmp_path: Path) -> None:
    (tmp_path / "strange.py").write_text(STRANGE.replace("ISOLATED", isolated))
    row = described(f"{tmp_path / 'strange.py'}:Strange", [], 4)
    assert row["properties"]["isolated"] is (isolated == "True")
    found: dict[str, Any] = row["measured"]
    assert found["oracle"] is None and found["random"]["n"] == 4  # of three tasks, the first of them twice
    assert found["random"]["steps"] == 1.0 and found["random"]["score"] == 0.5
    assert found["startup_s"] > 0 and found["steps_per_s"] > 0
    assert found["memory_mb"] > (20 if isolated == "False" else 40)  # Python takes this much, and so does a worker


def test_measured_shares_have_their_intervals() -> None:
    found = described("keyhole", list(HOUSE[1:]), 3)["measured"]
    # Of 3 of 3 Wilson's lower end is 1 / (1 + z²/3) with z² = 3.8415: 0.4385.
    assert found["oracle"]["n_solved"] == 3
    assert found["oracle"]["low"] == pytest.approx(0.4385, abs=1e-4) and found["oracle"]["high"] == 1.0


# --- the page ------------------------------------------------------------------------------------------------------


def rows_of_page() -> dict[str, list[str]]:
    _, table, _ = (DOCS / "environments.md").read_text("utf-8").split("<!-- environments -->")
    found = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.strip().splitlines()[2:]]
    return {row[0].strip("`"): row for row in found}


def test_the_table_of_the_page_has_all_kinds() -> None:
    assert list(rows_of_page()) == list(CATALOG["environment"])
    assert list(KNOWN) == [kind for kind in CATALOG["environment"] if kind in KNOWN]


@pytest.mark.parametrize("kind", ["keyhole", "shop", "wordle", "collaborate", "mcp", "graded", "processes"])
def test_rows_of_the_page_are_those_of_the_command(kind: str) -> None:
    assert rows_of_page()[kind][:5] == [f"`{kind}`", *cells(described(kind, []))[1:5]]


@pytest.mark.parametrize("kind", ["keyhole", "collaborate"])
def test_measured_shares_of_the_page_are_those_of_the_command(kind: str) -> None:
    assert rows_of_page()[kind][:7] == [f"`{kind}`", *cells(described(kind, [], 100))[1:]]


@pytest.mark.parametrize("kind", [kind for kind, known in KNOWN.items() if known.settings == "the defaults"])
def test_known_scores_of_the_defaults_are_those_measured(kind: str) -> None:
    measured, known = rows_of_page()[kind][5:7], KNOWN[kind]
    for share, figure in zip(measured, (known.random, known.oracle), strict=True):
        assert share.split(" of ")[0] == figure


@pytest.mark.parametrize("kind", list(KNOWN))
def test_known_scores_stand_on_their_pages(kind: str) -> None:
    known, section, found = KNOWN[kind], "", []
    for line in (DOCS / known.page).read_text("utf-8").splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        named = f"| `{kind}` |" in line or section == kind or "`" in known.settings
        found += [line] if line.startswith("| ") and known.settings in line and named else []
    assert any(f"| {known.random} |" in row and f"| {known.oracle} |" in row for row in found)
