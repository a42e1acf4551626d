"""Trajectories in the terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from rlhf.data import Action, Failure, Finish, Generation, Outcome, Prompt, Score, Trajectory, Turn, Verdict
from rlhf.evaluation.answers import SamplingCost
from rlhf.evaluation.rows import FailureRecord, TrajectoryRecord
from rlhf.viewer.terminal import TrajectoryTable, failure_table, flip_table, show_trajectory

EVIL = "[red]no[/red] [/] :smile: \x1b[31m"


def make_record(text: str = "go [north]", advantages: bool = True) -> TrajectoryRecord:
    """Two turns, the first of two generations, the second invalid."""
    calls = [Generation(Prompt((1,)), ids, (-0.5,) * len(ids), Finish.STOP, 2) for ids in ((5, 6), (7,), (8, 9))]
    turns = (
        Turn(Action(text, tuple(calls[:2])), "You see a door.", 0.5),
        Turn(Action("", (calls[2],), error="no action found"), "Say an action.", -0.1, valid=False),
    )
    t = Trajectory("coin/1", 3, "You are in the kitchen.", turns, Outcome.TURN_LIMIT, duration_s=1.25)
    score = Score({"outcome": Verdict(0.0), "valid": Verdict(-1.0)}, (0.5, -0.2), 0.3)
    tokens = ((1.0, 1.0), (0.25,), (-2.0, 0.0)) if advantages else None
    return TrajectoryRecord(4, "train", "train", "coin/1", t, score, tokens)


def shown(draw: Callable[[Console], None], width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    draw(console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_trajectory_is_shown_turn_by_turn() -> None:
    found = lines(shown(lambda c: show_trajectory(make_record(), c)))
    assert found[0].startswith("coin/1 train, train, step 4, attempt 3")
    assert found[1:] == [
        "You are in the kitchen.",
        "1 > go [north] reward +0.5 advantage +0.75",  # the score's turn reward; (1 + 1 + 0.25) / 3
        "You see a door.",
        "2 > (nothing) reward -0.2 invalid: no action found advantage -1",
        "Say an action.",
        "turn_limit score +0.3 (outcome 0, valid -1) 5 tokens, 1.2 s",
    ]


def test_the_reply_is_shown_of_which_no_action_was_read() -> None:
    record = make_record()
    first, second = record.trajectory.turns
    second = replace(second, action=replace(second.action, reply_text="i go north"))
    record = replace(record, trajectory=replace(record.trajectory, turns=(first, second)))
    assert "2 > i go north reward -0.2 invalid: no action found advantage -1" in lines(
        shown(lambda c: show_trajectory(record, c))
    )


def test_roles_notes_branches_and_choices_are_shown() -> None:
    record = make_record()
    first, second = record.trajectory.turns
    calls = tuple(replace(g, role=role) for g, role in zip(first.generations, ("plan", ""), strict=True))
    first = replace(first, action=replace(first.action, generations=calls, notes={"subgoal": "find the key"}))
    branch = replace(record.trajectory, turns=(first, second), parent=1, n_shared=1)
    spent = SamplingCost(2, "-0.5 by the judge, of 3", 3, 1, 9, 40, 300, False)
    found = lines(shown(lambda c: show_trajectory(replace(record, trajectory=branch, spent=spent), c), width=200))
    assert found[1:6] == [
        "branches off attempt 1 after 1 turns",
        "chosen from 3 candidates, 1 of them solved: candidate 2, -0.5 by the judge, of 3; they took 40 tokens and "
        "read 300",
        "You are in the kitchen.",
        "1 > go [north] reward +0.5 advantage +0.75 shared asked for plan, an action",
        "subgoal: find the key",
    ]
    again = replace(branch, n_shared=0)
    assert "differs from attempt 1" in shown(lambda c: show_trajectory(replace(record, trajectory=again), c))


def test_tokens_are_listed_with_log_prob_and_advantage() -> None:
    def pieces(token_ids: tuple[int, ...]) -> list[str]:
        return [f"<{i}>\n" for i in token_ids]

    found = lines(shown(lambda c: show_trajectory(make_record(), c, tokens=True, pieces=pieces)))
    rows = ["<5>↵ 5 -0.500 +1", "<6>↵ 6 -0.500 +1", "<7>↵ 7 -0.500 +0.25", "<8>↵ 8 -0.500 -2", "<9>↵ 9 -0.500 +0"]
    assert [line for line in found if line in rows] == rows
    assert found.count("token id log-prob advantage") == 3  # one list per generation
    plain = lines(shown(lambda c: show_trajectory(make_record(advantages=False), c, tokens=True)))
    assert "5 -0.500" in plain and not any("advantage +" in line for line in plain)


@pytest.mark.parametrize("tokens", [True, False])
def test_text_of_models_has_no_effect_on_the_terminal(tokens: bool) -> None:
    turn = Turn(Action(EVIL, make_record().trajectory.turns[0].generations, error=EVIL), EVIL, valid=False)
    t = Trajectory(EVIL, 0, EVIL, (turn,), Outcome.ENV_ERROR, detail=EVIL)
    record = TrajectoryRecord(0, "s", "eval", EVIL, t, Score({EVIL: Verdict(1.0)}, (1.0,), 1.0))
    text = shown(lambda c: show_trajectory(record, c, tokens, lambda ids: [EVIL] * len(ids)), width=400)
    assert "\x1b" not in text
    visible = "[red]no[/red] [/] :smile: ␛[31m"
    assert text.count(visible) == (10 if tokens else 7)  # task, opening, action, error, reply, detail, part, 3 tokens


def test_the_table_has_a_row_for_each_trajectory() -> None:
    found = lines(shown(lambda c: c.print(TrajectoryTable([make_record(), make_record(EVIL)]))))
    assert found[0] == "# step score turns tokens invalid s outcome made to task"
    assert found[1:] == [f"{i} 4 +0.3 2 5 1 1.2 turn_limit train (train) coin/1" for i in (0, 1)]


def test_failures_have_their_own_table() -> None:
    failure = FailureRecord(7, "train", "train", "coin/2", Failure(0, Outcome.TIMEOUT, "step took 30 s [x]"))
    found = lines(shown(lambda c: c.print(failure_table([failure], 120))))
    assert found == ["step outcome task message", "7 timeout coin/2 step took 30 s [x]"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_ids_of_tasks_are_whole_in_a_narrow_terminal(width: int) -> None:
    ids = ["textworld_express-1.0.5/cookingworld/numIngredients=3,numLocations=4/dev/12345", "coin/1"]
    records = [replace(make_record(), task_id=name) for name in ids]
    found = lines(shown(lambda c: c.print(TrajectoryTable(records), crop=False), width))
    assert found[-3:] == ["# task", f"0 {ids[0]}", f"1 {ids[1]}"]
    assert " ".join(found[:-3]).count("4 +0.3 2 5 1 1.2") == 2, "a row of figures is one line"
    failures = [FailureRecord(7, "train", "train", name, Failure(0, Outcome.TIMEOUT, "it took 30 s")) for name in ids]
    rows = shown(lambda c: c.print(failure_table(failures, width), crop=False), width).split()
    assert set(ids) <= set(rows) and rows.count("30") == 2
    titles = [lines(shown(lambda c, r=record: show_trajectory(r, c), width))[0] for record in records]
    assert all(title.startswith(f"{name} train, train, step 4") for title, name in zip(titles, ids, strict=True))


@pytest.mark.parametrize("names", [("a", "b"), ("a", "a run with a name that is long"), ("before", "after")])
def test_a_figure_of_an_evaluation_is_one_line_whatever_its_name(names: tuple[str, str]) -> None:
    task = "textworld_express-1.0.5/cookingworld/numIngredients=3,numLocations=4/dev/12345"
    found = shown(lambda c: c.print(flip_table([(task, "16 of 16", "0 of 16")], names, 40), crop=False), 40)
    assert f"{task} 16 of 16 0 of 16" in lines(found)
