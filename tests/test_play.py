"""`rlhf play` and `rlhf environments`: a person at an environment, and the list of what there is."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from environments.base import properties_of
from environments.games.key_door import Keyhole
from rlhf.catalog import CATALOG
from rlhf.cli import app
from rlhf.commands.env_summary import glance, kept, variant
from rlhf.commands.environments import cells, described
from rlhf.data import Action, Outcome, Task, Trajectory, Turn
from rlhf.evaluation.rows import TrajectoryRecord
from rlhf.evaluation.statistics import success_estimate
from rlhf.evaluation.store import TrajectoryWriter
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
    for more in ([], ["--agent", "chat"], ["--agent", "planner"]):
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


def test_where_actions_are_numbers_a_number_is_itself_and_places_have_a_sign(strange: str) -> None:
    for line, action in (("1", "1"), ("3", "3"), ("#1", "2"), ("#3", "hint")):
        assert last_json(typed(strange, lines=[line]))["actions"] == [action]
    done = typed(strange, lines=["#0", "#4", "#x", "quit"])
    assert last_json(done)["actions"] == ["#x"] and done.stdout.count("there are actions #1 to #3") == 2
    assert "  #1  2\n" in done.stdout and "4 is the number 4, #4 the fourth of the list" in done.stdout


def test_a_cell_that_is_typed_is_that_cell() -> None:
    board = ("textarena", "game=TicTacToe-v0", "max_steps=1")
    listed = [line.split() for line in typed(*board, lines=[]).stdout.splitlines() if line.startswith("  #")]
    assert all(place.startswith("#") for place, _ in listed)
    for place, cell in listed[:3]:
        for line in (cell, cell.strip("[]"), place):
            assert last_json(typed(*board, lines=[line]))["actions"] == [cell]


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
    done = typed(*HOUSE, "--agent", "chat", lines=["x" * 201, *plan])
    assert last_json(done)["actions"] == plan  # a reply that cannot be read is no step
    assert "--- system\nYou act in a text environment." in done.stdout
    assert "No action was taken: your action has 201 characters" in done.stdout
    assert done.stdout.count("--- system") == 1
    assert done.stdout.count("--- user") == len(plan) + 1  # the opening, the complaint, and all answers but the last


def test_an_agent_that_asks_several_times_for_one_action_does_so_here() -> None:
    plan = list(KEYHOLE.plan(task_of(), []) or ())
    first, *rest = plan
    done = typed(*HOUSE, "--agent", "planner", lines=["to the door", "state", first, "done", "hint", "out", *rest])
    assert last_json(done)["actions"] == plan and last_json(done)["success"] is True
    said = done.stdout
    assert said.count("--- your reply as plan\n") == 2 and said.count("--- your reply\n") == len(plan) + 1
    assert "--- system\nYou plan for an agent" in said and "1. to the door: done\n" in said
    assert "Subgoal: out\n" in said
    critic = typed(*HOUSE, "--agent", "critic", lines=[rest[0], "revise: no", first, "accept", "quit"])
    assert last_json(critic)["actions"] == [first]
    assert f"Proposed: {rest[0]}\n" in critic.stdout and "--- user\nNot yet: no\n" in critic.stdout
    assert "--- your reply as critic\n" in critic.stdout and "--- your reply as actor\n" in critic.stdout


def test_all_calls_of_one_reply_are_made_and_keys_of_the_agent_may_be_given() -> None:
    calls = '{"name": "a", "arguments": {}}\n{"name": "b", "arguments": {}}'
    agent = "{kind: tools, tool_format: hermes, system: Call.}"
    tagged = "".join(f"<tool_call>{call}</tool_call>" for call in calls.splitlines())
    done = typed(*HOUSE, "--agent", agent, lines=[tagged, "quit"])
    assert last_json(done)["actions"] == calls.splitlines(), done.output
    assert "--- system\nCall.\n" in done.stdout and "[step 2 of " in done.stdout
    last = done.stdout.rpartition("--- user\n")[2]
    assert last.count("Unknown action") == 2  # one message with the answers to both


def test_one_player_has_all_seats_and_sees_in_each_what_it_sees() -> None:
    board = ("textarena", "game=TicTacToe-v0", "opponent=self")
    done = typed(*board, "--agent", "self_play", lines=["[4]", "[0]", "quit"])
    assert last_json(done)["actions"] == ["[4]", "[0]"], done.output
    replies = [line for line in done.stdout.splitlines() if line.startswith("--- your reply as ")]
    assert len(replies) == 3 and replies[0] == replies[2] != replies[1]


AGENTS = """
from dataclasses import dataclass
from rlhf.data import Action

@dataclass(frozen=True)
class Scripted:
    async def act(self, history, policy):
        return Action("boom" if history.turns else "2")

@dataclass(frozen=True)
class Lost:
    async def act(self, history, policy):
        return Action("", error="I am lost.")

@dataclass(frozen=True)
class Broken:
    async def act(self, history, policy):
        raise KeyError("boom")
"""


def test_agents_of_one_s_own_are_played_too(strange: str, tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    scripted, lost, broken = (f"{tmp_path / 'agents.py'}:{name}" for name in ("Scripted", "Lost", "Broken"))
    assert last_json(typed(strange, "--agent", scripted, lines=[]))["actions"] == ["2"]
    for agent, told in ((lost, "has no action that a person could choose"), (broken, "KeyError: 'boom'")):
        done = typed(strange, "--agent", agent, lines=[])
        assert done.exit_code == 2 and told in done.stderr and "run `rlhf check agent`" in done.stderr


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        ("planer", ["error --agent.kind: no agent is called 'planer'", "did you mean 'planner'?"]),
        (
            "{kind: chat, fromat: tagged}",
            ["error --agent.fromat: ChatAgent has no key 'fromat'", "did you mean 'format'?"],
        ),
        ("remembering", ["error --agent.kind: this agent needs the store of a run", "`rlhf memory RUN`"]),
    ],
)
def test_what_cannot_be_played_is_told_in_four_parts(agent: str, told: list[str]) -> None:
    done = typed(*HOUSE, "--agent", agent, lines=[])
    assert done.exit_code == 2 and all(part in done.stderr for part in told), done.stderr
    assert "expected: " in done.stderr and "Task " not in done.stdout


def test_the_heading_says_which_of_several_games_it_is_and_how_to_choose(strange: str) -> None:
    how = "for another one game=NAME, where a wrong name lists all there are]"
    said = typed("toy_text", lines=["quit"]).stdout
    assert said.splitlines()[1] == f"[game frozen_lake, the default; {how}"
    assert f"[game taxi; {how}" in typed("toy_text", "game=taxi", lines=["quit"]).stdout
    wrong = run("play", "toy_text", "game=NAME")
    assert wrong.exit_code == 2 and "frozen_lake, taxi, cliff_walking, blackjack" in wrong.stderr
    for single in (HOUSE, (strange,)):
        assert "for another" not in typed(*single, lines=["quit"]).stdout


@pytest.mark.parametrize(
    "kind",
    [
        *("babyai", "bfcl", "matrix_game", "minihack", "reasoning_gym", "scienceworld", "textarena", "textworld"),
        *("textworld_express", "toy_text"),
    ],
)
def test_a_wrong_game_lists_all(kind: str) -> None:
    given = {"game": "coin"} if kind == "textworld_express" else {}
    key, chosen = variant(kind, given).partition(",")[0].partition(";")[0].split(" ")
    wrong = run("play", kind, f"{key}=NAME")
    if "pip install" in wrong.stderr:
        pytest.skip(wrong.stderr)
    assert wrong.exit_code == 2 and re.search(rf"expected: .*\b{chosen}\b", wrong.stderr), wrong.output


# --- environments --------------------------------------------------------------------------------------------------


def test_a_row_is_what_the_environment_declares() -> None:
    row = last_json(run("environments", *HOUSE, "n_test=7", "--json"))["environments"][0]
    declared = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(properties_of(KEYHOLE)).items()}
    assert row["properties"] == declared
    assert row["tasks"] == {"train": 1000, "dev": 1000, "test": 7}
    assert row["max_steps"] == KEYHOLE.max_steps
    assert "deterministic, replayable" in run("environments", *HOUSE).stdout


def test_the_list_of_kinds_starts_none_and_loads_no_package() -> None:
    code = """
import sys
from rlhf.cli import app
app(["environments"], standalone_mode=False)
heavy = ("torch", "numpy", "gymnasium", "minigrid", "textworld", "nle", "reasoning_gym", "textarena")
print([name for name in sys.modules if name in heavy or name.startswith("environments.")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_list_of_kinds_has_clear_columns() -> None:
    lines = run("environments").stdout.splitlines()
    table = lines[: lines.index("")]
    assert [line.split()[0] for line in table] == ["kind", *CATALOG["environment"]]
    house = next(line for line in table if line.startswith("keyhole"))
    assert house.split() == ["keyhole", "-", "drtio", *["1,000"] * 2, "16", "0", "of", "100"]
    assert len(set(map(len, table))) == 1  # the last column ends where its head does
    assert "mixed needs parts" in "\n".join(lines)


def test_the_list_of_kinds_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.commands.env_summary.find_spec", lambda name: None)  # as where no extra is installed
    lines = run("environments").stdout.splitlines()
    assert max(len(line) for line in lines if " is absent: " not in line) <= 80
    assert "*reasoning-gym is absent: pip install 'rlhf-agents[reasoning-gym]'" in lines
    assert next(line for line in lines if line.startswith("reasoning_gym")).split()[1] == "reasoning-gym*"


def test_what_is_kept_of_a_kind_is_what_it_declares() -> None:
    row, found = glance("keyhole"), described("keyhole", [])
    assert row["tasks"] == found["tasks"] and row["max_steps"] == found["max_steps"]
    assert row["promises"] == [name for name in row["promises"] if found["properties"][name]]
    assert row["oracle"] == [100, 100] and row["memory_mb"] > 0
    listed = last_json(run("environments", "--json"))["environments"]
    assert [one["kind"] for one in listed] == list(CATALOG["environment"]) and listed[2] == row


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
    # Of 3 of 3: 4.8 of 6.6 with the values added, m = 0.727273, s/√6.6 = 0.188193, t(0.975, 5.6) = 2.491: 0.2585.
    assert found["oracle"]["n_solved"] == 3
    assert found["oracle"]["low"] == pytest.approx(0.2585, abs=1e-3) and found["oracle"]["high"] == 1.0


def test_tasks_that_are_played_again_are_other_episodes_of_the_same_tasks(tmp_path: Path) -> None:
    planned = "    def plan(self, task, taken):\n        return ['2']\n\n    def start("
    (tmp_path / "few.py").write_text(
        STRANGE.replace("isolated=ISOLATED", "oracle=True").replace("    def start(", planned)
    )
    found = described(f"{tmp_path / 'few.py'}:Strange", [], 30)["measured"]
    assert found["oracle"]["n"] == found["oracle"]["n_solved"] == 3  # one of each task
    chance = found["random"]
    assert chance["n"] == 30 and chance["n_solved"] not in (
        0,
        10,
        20,
        30,
    )  # all of a task, or none, if each was the same
    again = [random.Random(f"{i}/{r}" if r else i).choice("23h") == "2" for r in range(10) for i in range(3)]
    expected = success_estimate(again, [i for _ in range(10) for i in range(3)])
    assert (chance["n_solved"], chance["low"], chance["high"]) == (sum(again), expected.low, expected.high)


# --- the page ------------------------------------------------------------------------------------------------------


def table_of_page() -> list[str]:
    _, _, rest = (DOCS / "environments.md").read_text("utf-8").partition("markdown` -->")
    return rest.partition("<!-- end of environments -->")[0].strip().splitlines()


def rows_of_page() -> dict[str, list[str]]:
    found = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table_of_page()[2:]]
    return {row[0].strip("`"): row for row in found}


def test_the_table_of_the_page_has_all_kinds() -> None:
    assert list(rows_of_page()) == list(CATALOG["environment"])


def test_the_table_of_the_page_is_the_one_that_is_kept() -> None:
    kept_rows = {kind: list(row.values()) for kind, row in kept().items()}
    assert rows_of_page() == kept_rows
    shown = run("environments", "--markdown").stdout.strip().splitlines()
    assert shown == table_of_page()


@pytest.mark.parametrize("kind", ["keyhole", "shop", "wordle", "collaborate", "mcp", "graded", "worker_processes"])
def test_rows_of_the_page_are_those_of_the_command(kind: str) -> None:
    assert rows_of_page()[kind][:5] == [f"`{kind}`", *cells(described(kind, []))[1:5]]


@pytest.mark.parametrize("kind", ["keyhole", "collaborate"])
def test_measured_shares_of_the_page_are_those_of_the_command(kind: str) -> None:
    assert rows_of_page()[kind][:7] == [f"`{kind}`", *cells(described(kind, [], 100))[1:]]


def test_a_stored_attempt_is_played_on(tmp_path: Path) -> None:
    task = task_of()
    plan = list(KEYHOLE.plan(task, []) or ())
    turns = tuple(Turn(Action(action), "done") for action in plan)
    stored = Trajectory(task.id, 0, "", turns, Outcome.SOLVED)
    record = TrajectoryRecord(3, "0-pg", "eval", task.id, stored)
    TrajectoryWriter(tmp_path / "trajectories").write("0-pg", 3, "eval", [record])
    (tmp_path / "recipe.yaml").write_text(
        "policy: {kind: from_scratch}\nenvironment: {kind: keyhole, rows: 3, columns: 3, loops: 4}\n"
        "rewards: {outcome: {kind: outcome}}\nstages: [{kind: policy_gradient, steps: 1}]\n"
    )
    place = "0-pg:eval:3:0"
    on = typed(str(tmp_path), "--from", place, lines=[plan[-1]])
    assert last_json(on)["actions"] == plan and last_json(on)["success"]
    two = typed(str(tmp_path), "--from", place, "--turns", "2", lines=[])
    assert last_json(two)["actions"] == plan[:2] and not last_json(two)["over"]
    for words, says in (
        (["--from", "nonsense"], "not the place of an attempt"),
        (["--from", place, "--agent", "chat"], "agent"),
    ):
        refused = typed(str(tmp_path), *words, lines=[])
        assert refused.exit_code == 2 and says in refused.output


@pytest.mark.parametrize("name", ["quickstart", str(DOCS.parent / "recipes/quickstart.yaml")])
def test_a_recipe_is_answered_with_the_command_that_plays_its_environment(name: str) -> None:
    refused = run("play", name)
    assert refused.exit_code == 2 and "this is a recipe" in refused.stderr
    assert "rlhf play babyai level=GoToObj max_steps=16" in refused.stderr
