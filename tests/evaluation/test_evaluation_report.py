"""The page of an evaluation: self-contained, the same twice, and honest about the hardest tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.data import Action, Failure, Outcome, Score, ScoredGroup, Trajectory, Turn, Verdict
from rlhf.errors import DataError
from rlhf.evaluation.attempts import Attempt, read_attempts
from rlhf.evaluation.evaluation_report import hardest, write_evaluation_report
from rlhf.evaluation.store import TrajectoryWriter
from rlhf.evaluation.summary import summarize
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
    path = write_evaluation_report(folder)
    page = Page(path.read_text("utf-8"))
    assert path == folder / "report.html" and page.fetches_nothing()
    # 4 of the 7 attempts that count
    assert "57.1%" in page.words and "success in 7 attempts at 4 tasks" in page.words
    assert "1 attempts ended by the failure of a part" in page.words and "errors: env error 1" in page.words
    labels = [a.get("aria-label") or "" for tag, a in page.elements if tag == "svg"]
    titles = ("Success", "Success by type of task", "Solved within n actions", "One of k attempts")
    assert all(any(label.startswith(title) for label in labels) for title in titles)
    # the types take turns, the harder one first: a/2 was never solved, b/1 is the hardest of the other type
    assert page.count("article") == 4
    below = page.words[page.words.rindex("The hardest tasks") :]
    assert below.index("house/a/2") < below.index("flat/b/1") < below.index("house/a/3") < below.index("house/a/1")
    assert "knock" in page.words and "reply 5 to knock" in page.words and "turn_limit" in page.words
    assert "torch" in page.words and "asked:" in page.words


def test_the_curve_of_actions_counts_what_was_solved_by_then(folder: Path) -> None:
    page = Page(write_evaluation_report(folder).read_text("utf-8"))
    # solved in 2, 3, 3 and 4 actions, of 7 attempts: 0, 1/7, 3/7, 4/7 and 4/7 from there on
    shares = {1: "0%", 2: "14.3%", 3: "42.9%", 4: "57.1%", 6: "57.1%"}
    assert all(f"all, actions {n}: {share}" in page.text for n, share in shares.items())


def test_the_same_files_give_the_same_page_wherever_they_are(folder: Path, tmp_path: Path) -> None:
    other = folder.rename(tmp_path / "elsewhere")
    first = write_evaluation_report(other).read_bytes()
    assert write_evaluation_report(other.rename(folder)).read_bytes() == first


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
    page = Page(write_evaluation_report(folder).read_text("utf-8"))
    assert page.count("script") == 1 and page.fetches_nothing()
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)


def test_a_missing_or_damaged_file_is_named(folder: Path) -> None:
    (folder / "versions.json").write_text("{")
    with pytest.raises(DataError, match=r"versions\.json"):
        write_evaluation_report(folder)
    (folder / "versions.json").unlink()
    with pytest.raises(DataError, match=r"versions\.json"):
        write_evaluation_report(folder)


def test_nothing_but_errors_has_a_page(tmp_path: Path) -> None:
    folder = write(tmp_path / "errors", {"house/a/1": [None, None]})
    summary = json.loads((folder / "summary.json").read_text())
    for name in ("success", "score"):
        summary[name]["value"] = None  # as the command writes what is no number
    for each in (*summary["parts"].values(), *summary["types"].values()):
        each["success"]["value"] = each["score"]["value"] = None
    (folder / "summary.json").write_text(json.dumps(summary).replace("NaN", "null").replace("-Infinity", "null"))
    page = Page(write_evaluation_report(folder).read_text("utf-8"))
    assert "No attempt was played to its end." in page.words
