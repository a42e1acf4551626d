"""The page of an evaluation: self-contained, the same twice, and honest about the hardest tasks."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf.commands.tables import show_summary
from rlhf.data import (
    Action,
    Failure,
    Finish,
    Generation,
    Outcome,
    Prompt,
    Score,
    ScoredGroup,
    Trajectory,
    Turn,
    Verdict,
)
from rlhf.errors import DataError
from rlhf.evaluation.attempts import Attempt, read_attempts
from rlhf.evaluation.store import TrajectoryWriter, list_steps, read_columns
from rlhf.evaluation.summary import summarize
from rlhf.terminal import CleanConsole
from rlhf.viewer.attempts import Attempts
from rlhf.viewer.evaluation_views import hardest, paired
from rlhf.viewer.report import write_report
from tests.evaluation.pages import Page

EVIL = '</pre><script>alert("x")</script><img src=x onerror=alert(1)> ${x} $style \x1b[31m'


def attempt(task: str, number: int, solved: bool, n_turns: int, text: str = "go") -> Trajectory:
    turns = tuple(Turn(Action(text), f"reply {i} to {text}") for i in range(n_turns))
    return Trajectory(task, number, "A door.", turns, Outcome.SOLVED if solved else Outcome.TURN_LIMIT)


def write(folder: Path, groups: dict[str, list[Trajectory | None]], policy: str = "me") -> Path:
    """The folder of an evaluation with these attempts; None is an environment that crashed."""
    written = []
    for task, found in groups.items():
        made = tuple(t for t in found if t is not None)
        scores = tuple(
            Score({"s": Verdict(float(t.solved))}, (0.0,) * (len(t.turns) - 1) + (float(t.solved),), float(t.solved))
            for t in made
        )
        failures = tuple(Failure(i, Outcome.ENV_ERROR, f"died {EVIL}") for i, t in enumerate(found) if t is None)
        written.append(ScoredGroup(task, made, scores, failures))
    TrajectoryWriter(folder / "trajectories").write_groups("tasks", 0, "eval", written)
    summary: dict[str, Any] = {"policy": policy, "suite": "houses", "attempts": 2, "metric": "success", "data": {}}
    summary |= summarize(read_attempts(folder / "trajectories"))
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "evaluation.yaml").write_text(f"asked: {json.dumps(policy)}\n")
    (folder / "versions.json").write_text(json.dumps({"torch": "2.13.0"}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(
        tmp_path / "evaluation",
        {
            "house/a/1": [attempt("house/a/1", 0, True, 2), attempt("house/a/1", 1, True, 3)],
            "house/a/2": [attempt("house/a/2", 0, False, 6, "knock"), attempt("house/a/2", 1, False, 6)],
            "house/a/3": [attempt("house/a/3", 0, False, 4), attempt("house/a/3", 1, True, 4)],
            "flat/b/1": [attempt("flat/b/1", 0, True, 3, "climb"), None],
        },
    )


def test_it_shows_figures_plots_and_the_hardest_tasks(folder: Path) -> None:
    path = write_report(folder)
    page = Page(path.read_text("utf-8"))
    assert path == folder / "report.html" and page.fetches_nothing()
    found = page.answers["run/evaluation/evaluation"]
    # 4 of the 7 attempts that count
    assert found["success"]["value"] == pytest.approx(4 / 7) and found["success"]["n"] == 7 and found["n_tasks"] == 4
    assert "Success 57.1%" in page.words and "4 tasks, 2 attempts at each, 1 errors" in page.words
    assert found["n_errors"] == 1 and ["errors: env error", "1"] in found["figures"]
    assert {"house/a", "flat/b"} == set(found["types"]) and [one["k"] for one in found["passes"]] == [1, 2]
    # the types take turns, the harder one first: a/2 was never solved, b/1 is the hardest of the other type
    assert [one["task_id"] for one in found["hardest"]] == ["house/a/2", "flat/b/1", "house/a/3", "house/a/1"]
    place = found["hardest"][0]["place"]
    held = page.attempts[f"evaluation/{place['stage']}:{place['phase']}:{place['step']}"]["attempts"][place["row"]]
    said = [(turn["action"], turn["reply"]) for turn in held["turns"]]
    assert held["outcome"] == "turn_limit" and said[5] == ("knock", "reply 5 to knock")
    facts = page.answers["run/evaluation/facts"]
    assert ["torch", "2.13.0"] in facts["versions"] and "asked:" in facts["recipe"]


def test_the_curve_of_actions_counts_what_was_solved_by_then(folder: Path) -> None:
    [curve] = Page(write_report(folder).read_text("utf-8")).answers["run/evaluation/evaluation"]["within"]
    # solved in 2, 3, 3 and 4 actions, of 7 attempts: 0, 1/7, 3/7, 4/7 and 4/7 from there on
    assert curve == {"label": "all", "share": pytest.approx([0, 1 / 7, 3 / 7, 4 / 7, 4 / 7, 4 / 7])}


def test_a_reply_that_was_cut_at_the_token_limit_is_no_turn_limit(tmp_path: Path) -> None:
    def ended(number: int, finish: Finish, error: str | None) -> Trajectory:
        reply = Generation(Prompt((1,)), (2,), (-0.5,), finish, 0)
        return Trajectory("t", number, "?", (Turn(Action("", (reply,), error), "?"),), Outcome.TURN_LIMIT)

    cut, unread, acted = (Finish.LENGTH, "cut off"), (Finish.STOP, "no action"), (Finish.LENGTH, None)
    made: list[Trajectory | None] = [ended(i, *end) for i, end in enumerate([cut, cut, unread, acted])]
    summary = json.loads((write(tmp_path / "cut", {"t": made}) / "summary.json").read_text())
    assert summary["truncated"] == {"reply_limit": 2, "turn_limit": 2, "token_limit": 0}
    shown = io.StringIO()
    show_summary(summary, CleanConsole(file=shown, width=200))
    assert "not solved 4: cut off 2 reply_limit (limits.max_tokens), 2 turn_limit" in shown.getvalue()


def test_cut_and_empty_replies_are_counted_whatever_ended_the_attempt(tmp_path: Path) -> None:
    def ended(number: int, finish: Finish, said: str, role: str = "") -> Trajectory:
        reply = Generation(Prompt((1,)), (2,), (-0.5,), finish, 0, role=role, usage=(7, 3))
        action = Action(said, (reply,), reply_text=said)
        return Trajectory("t", number, "?", (Turn(action, "", 0.0),), Outcome.FAILED)

    ends = [(Finish.LENGTH, "so far"), (Finish.LENGTH, " \n"), (Finish.STOP, ""), (Finish.STOP, "4")]
    made: list[Trajectory | None] = [ended(i, *end) for i, end in enumerate(ends)]
    made.append(ended(4, Finish.STOP, "", role="plan"))  # a plan that could not be read is no reply of its own
    folder = write(tmp_path / "cut", {"t": made})
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["truncated"] == {"reply_limit": 0, "turn_limit": 0, "token_limit": 0}  # none was ended by a limit
    assert [summary[f"n_{what}"] for what in ("replies", "cut_replies", "empty_replies")] == [5, 2, 2]
    [stored] = list_steps(folder / "trajectories")
    assert [row["n_tokens"] for row in read_columns(stored.path, ["n_tokens"])] == [3] * 5  # as the server counted
    shown = Page(write_report(folder).read_text("utf-8")).answers
    assert "replies cut before they ended" in json.dumps(shown)


def test_each_of_several_rewards_has_its_mean(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rewards"]["s"] == summary["score"]
    judged = [Attempt("p", f"t/{i}", 0, Outcome.SOLVED, 1.0, rewards=(("r", i / 4), ("brief", 0.5))) for i in range(5)]
    found = summarize([*judged, Attempt("p", "t/9", 0, Outcome.ENV_ERROR)])
    assert [found["rewards"][name]["value"] for name in ("r", "brief")] == [0.5, 0.5]
    assert found["rewards"]["r"]["n"] == 5 and found["rewards"]["r"]["low"] < 0.5 < found["rewards"]["r"]["high"]
    shown = io.StringIO()
    show_summary(summary | found, CleanConsole(file=shown, width=200))
    show_summary(summary, CleanConsole(file=shown, width=200))
    assert shown.getvalue().count("mean of ") == 2 and "mean of brief 0.500 (" in shown.getvalue()


def test_the_same_files_give_the_same_page_wherever_they_are(folder: Path, tmp_path: Path) -> None:
    other = folder.rename(tmp_path / "elsewhere")
    first = write_report(other).read_bytes()
    assert write_report(other.rename(folder)).read_bytes() == first


def test_tasks_that_began_otherwise_are_not_compared(folder: Path, tmp_path: Path) -> None:
    moved = replace(attempt("house/a/1", 0, False, 2), opening="A wall.")
    other = write(tmp_path / "other", {"house/a/1": [moved]})
    same = write(tmp_path / "same", {"house/a/1": [attempt("house/a/1", 0, False, 2)]})
    first = (Attempts(folder / "trajectories"), "")
    assert paired(first, (Attempts(same / "trajectories"), ""))["n"] == 1
    problem = paired(first, (Attempts(other / "trajectories"), ""))["problem"]
    assert "tasks with equal ids differ in content" in problem and "evaluation and other" in problem


def test_the_hardest_tasks_are_those_solved_least_with_types_in_turn() -> None:
    def made(task: str, outcomes: str, score: float = 0.0, n_turns: int = 1) -> list[Attempt]:
        ends = {"s": Outcome.SOLVED, "f": Outcome.FAILED, "e": Outcome.ENV_ERROR}
        return [Attempt("p", task, i, ends[o], score, n_turns) for i, o in enumerate(outcomes)]

    attempts = [
        *made("a/1", "ff", 0.5),
        *made("a/2", "ff", 0.1, 3),
        *made("a/3", "ff", 0.1, 9),  # as hard as a/2, and longer
        *made("b/1", "sf"),
        *made("b/2", "ss"),
        *made("c/1", "ee"),  # nothing is known of it
    ]
    assert [t.task_id for t in hardest(attempts, 9)] == ["a/3", "b/1", "a/2", "b/2", "a/1"]
    assert [t.task_id for t in hardest(attempts, 2)] == ["a/3", "b/1"]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    bad = Trajectory(EVIL, 0, EVIL, (Turn(Action("", error=EVIL), EVIL, valid=False),), Outcome.FAILED, detail=EVIL)
    folder = write(tmp_path / "evil", {EVIL: [bad, None]}, policy=EVIL)
    page = Page(write_report(folder).read_text("utf-8"))
    assert page.count("script") == 3 and page.fetches_nothing()
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)


def test_a_missing_or_damaged_file_is_named(folder: Path) -> None:
    (folder / "versions.json").write_text("{")
    with pytest.raises(DataError, match=r"versions\.json"):
        write_report(folder)
    (folder / "versions.json").unlink()
    with pytest.raises(DataError, match=r"versions\.json"):
        write_report(folder)


def test_nothing_but_errors_has_a_page(tmp_path: Path) -> None:
    folder = write(tmp_path / "errors", {"house/a/1": [None, None]})
    summary = json.loads((folder / "summary.json").read_text())
    for name in ("success", "score"):
        summary[name]["value"] = None  # as the command writes what is no number
    for each in (*summary["parts"].values(), *summary["types"].values()):
        each["success"]["value"] = each["score"]["value"] = None
    (folder / "summary.json").write_text(json.dumps(summary).replace("NaN", "null").replace("-Infinity", "null"))
    found = Page(write_report(folder).read_text("utf-8")).answers["run/evaluation/evaluation"]
    assert found["hardest"] == [] and found["success"]["value"] is None and found["within"] == []
