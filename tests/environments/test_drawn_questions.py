"""Hierarchies, tables, experts, grids, texts and verdicts: worked by hand, by brute force, and their oracles."""

from __future__ import annotations

import ast
import json
import random
import sqlite3
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.contrib.arc import Arc, applied, edited, read_grid
from environments.contrib.colleague import Colleague, Wanted
from environments.contrib.hierarchy import Hierarchy, Tree
from environments.contrib.hierarchy import judge as of_names
from environments.contrib.ml_task import MlTask, labelled, skill
from environments.contrib.questions.conversations import Conversations
from environments.contrib.questions.next_segment import NextSegment
from environments.contrib.questions.routing import Exchange, Routing, RoutingEpisode
from environments.contrib.questions.self_made import SelfMade
from environments.contrib.questions.table_questions import TableQuestion, TableQuestions, looked_up
from environments.contrib.questions.table_questions import judge as of_values
from environments.contrib.questions.verdicts import Verdicts
from environments.contrib.repair import _LIBRARY, Repair, mutants
from environments.contrib.text_to_sql import draw
from rewards.contrib.search import CostAware
from rewards.judges.judge import Judge
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.recipe import load
from rlhf.recipe.builder import build_environment
from rlhf.recipe.suites import load_suite
from tests.environments.worlds import oracle_play, play, random_play

COMPARED = Path(__file__).parent / "compared.jsonl"
SMALL: dict[str, Any] = {"n_train": 30, "n_dev": 30, "n_test": 60}
#: Root 0 with 1 and 2 under it, 3 and 4 under 1, 5 under 4.
PARENTS = (-1, 0, 0, 1, 1, 4)


def tree(kind: Any, *about: int) -> Tree:
    return Tree(tuple("abcdef"), PARENTS, (1, 2, 3, 4, 5), kind, about)


# --- hierarchies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "about", "answer"),
    [
        ("parent", (4,), ["b"]), ("path", (5,), ["e", "b", "a"]), ("depth", (5,), ["3"]), ("leaves", (1,), ["2"]),
        ("common", (3, 5), ["b"]), ("common", (2, 5), ["a"]), ("move", (4, 2, 5), ["3"]), ("move", (1, 2, 5), ["4"]),
    ],
)  # fmt: skip
def test_a_tree_worked_by_hand(kind: str, about: tuple[int, ...], answer: list[str]) -> None:
    assert tree(kind, *about).answer() == answer


@given(st.integers(0, 10_000))
def test_every_question_agrees_with_a_search_over_all_paths(seed: int) -> None:
    drawn = Hierarchy(nodes=8).draw(random.Random(seed))
    edges = {(drawn.names[p], drawn.names[i]) for i, p in enumerate(drawn.parents) if p >= 0}
    if drawn.kind == "move":
        x, y = (drawn.names[i] for i in drawn.about[:2])
        edges = {(a, b) for a, b in edges if b != x} | {(y, x)}
    reach = set(edges)
    while more := {(a, d) for a, b in reach for c, d in reach if b == c} - reach:
        reach |= more
    x, *others = (drawn.names[i] for i in drawn.about)
    above = {name: {a for a, b in reach if b == name} for name in drawn.names}
    depth_first = sorted(above[x], key=lambda a: -len(above[a]))
    expected = {
        "parent": depth_first[:1],
        "path": depth_first,
        "depth": [str(len(above[x]))],
        "leaves": [str(sum(x in above[n] and not any(n in above[m] for m in drawn.names) for n in drawn.names))],
        "common": sorted(above[x] & above[others[0]] if others else (), key=lambda a: -len(above[a]))[:1],
        "move": [str(len(above[others[-1]]))] if others else [],
    }[drawn.kind]
    assert drawn.answer() == expected


def test_answers_are_read_from_words() -> None:
    named = Tree(("Alda", "Belgus"), (-1, 0), (1,), "parent", (1,))
    assert of_names(named, "It is ALDA.").solved and not of_names(named, "Belgus, Alda").solved
    assert of_names(named, "nobody").answer is None and of_names(tree("depth", 5), "there are 3").solved


# --- tables ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000))
def test_tables_are_shown_whole(seed: int) -> None:
    problem = draw(random.Random(seed), "aggregate", 6)
    text, answer = looked_up(problem)
    database, name = sqlite3.connect(":memory:"), ""
    for line in text.splitlines():  # a second database, of what is shown
        if line.endswith("):"):
            name = line.partition("(")[0]
            database.execute(f"CREATE TABLE {line[:-1]}")
        else:
            values = tuple(int(x) if x.isdigit() else x for x in line.split(","))
            database.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(values))})", values)
    [[found]] = database.execute(problem.query).fetchall()
    assert float(answer[0]) == pytest.approx(found, abs=0.01)


def test_values_are_compared_in_any_order() -> None:
    asked = TableQuestion("", "?", ("Ann", "Bo"))
    assert of_values(asked, "bo, 'Ann'.").solved and of_values(asked, "Ann and Bo").solved
    assert not of_values(asked, "Ann").solved and not of_values(asked, "Ann, Bo, Bo").solved
    assert of_values(TableQuestion("", "?", ("12.5",)), "12.50").solved and of_values(asked, " ").answer is None


def test_a_statement_is_true_or_it_is_not() -> None:
    world = TableQuestions(questions=("verify",), **SMALL)
    rules = [world.instance(task) for task in world.tasks("test")]
    said = [rule.answer[0] for rule in rules]
    assert 15 < said.count("true") < 45 and set(said) == {"true", "false"}


# --- experts ---------------------------------------------------------------------------------------------------------

EXCHANGE = Exchange((("duke", 10, (0, 1), "fabel"), ("penny", 1, (1,), "kidan")), 0, "Quor", "fabel")


def test_asking_costs_and_the_right_code_solves() -> None:
    from tests.rewards.played import played, task

    episode = RoutingEpisode(EXCHANGE, Routing())
    said = ["ask penny", "ask nobody", "ask duke", "answer fabel"]
    results = [episode.act(action) for action in said]
    assert [r.reply for r in results[::2]] == ["penny: the code is kidan. Cost: 1", "duke: the code is fabel. Cost: 10"]
    assert not results[1].valid and results[3].success and results[3].reply == "Right. Spent 11 in all."
    # √11 = 3.3166 between 0 and 10: S = .668338, and (1 + 0) .5 + .5 S.
    attempt = played(*((a, r.reply) for a, r in zip(["ask[penny]", "ask[nobody]", "ask[duke]"], results, strict=False)),
                     "answer[fabel]")  # fmt: skip
    reward = CostAware(cost_weight=0.5, max_sqrt_cost=10.0)
    assert reward(task("fabel"), attempt).value == pytest.approx(0.5 + 0.5 * (1 - 11**0.5 / 10))


def test_the_oracle_asks_the_cheapest_who_knows() -> None:
    world = Routing(**SMALL)
    for task in world.tasks("test"):
        asked, answered = world.plan(task, ()) or ()
        exchange = world.instance(task)
        knowing = [e for e in exchange.experts if e[3] == exchange.code]
        assert asked == f"ask {min(knowing, key=lambda e: e[1])[0]}" and answered == f"answer {task.reference}"


# --- grids -----------------------------------------------------------------------------------------------------------


def test_edits_worked_by_hand() -> None:
    grid = read_grid("120/340")
    assert grid is not None
    made = {
        "mirror": "021/043", "flip": "340/120", "rotate": "31/42/00", "transpose": "13/24/00",
        "recolour 0 9": "129/349", "paint 1 2 5": "120/345", "fill 0 0 1 1 7": "770/770", "grid 1/2": "1/2",
        "copy": "120/340",
    }  # fmt: skip
    for action, text in made.items():
        assert edited(action, grid, grid) == read_grid(text), action
    for action in ("", "paint 2 0 1", "fill 0 0 0 3 1", "recolour 1 10", "grid 12/3", "turn", "mirror 1", "paint 0 0"):
        assert edited(action, grid, grid) is None, action
    assert applied(("rotate",) * 4, grid) == grid == applied(("transpose", "transpose"), grid)


def test_one_rule_of_two_edits_is_found_by_trying_all() -> None:
    world = Arc(edits=2, **SMALL)
    edits = ["mirror", "flip", "rotate", "transpose", *(f"recolour {a} {b}" for a in range(5) for b in range(5))]
    for task in world.tasks("test"):
        rule = world.rule(task)
        fits = [two for two in product(edits, repeat=2) if all(applied(two, a) == b for a, b in rule.examples)]
        assert rule.edits in fits and applied(rule.edits, rule.given) == rule.wanted
        assert {applied(two, rule.given) for two in fits} == {rule.wanted, *rule.others}


def test_two_edits_that_explain_the_examples_are_both_right() -> None:
    world = Arc()
    [task] = [task for task in world.tasks("test") if task.id.endswith("/20000142")]
    rule = world.rule(task)
    edits = ["mirror", "flip", "rotate", "transpose", *(f"recolour {a} {b}" for a in range(5) for b in range(5))]
    fits = [edit for edit in edits if all(applied((edit,), a) == b for a, b in rule.examples)]
    assert {applied((edit,), rule.given) for edit in fits} == {rule.wanted, *rule.others} and len(rule.others) == 1
    assert all(play(world, task, [edit, "submit"])[-1].success for edit in fits)
    assert not play(world, task, ["submit"])[-1].success


def test_files_of_arc_are_read(tmp_path: Path) -> None:
    pair = {"input": [[1, 2], [3, 4]], "output": [[2, 1], [4, 3]]}
    for folder in ("training", "evaluation"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0a.json").write_text(json.dumps({"train": [pair], "test": [pair, pair]}))
    world = Arc(path=tmp_path)
    [first, second] = world.tasks("test")
    assert (first.id, second.id) == ("arc/test/0a#0", "arc/test/0a#1") and world.tasks("dev") == []
    assert play(world, first, world.plan(first, ()) or ())[-1].success
    assert play(world, second, ["mirror", "submit"])[-1].success
    (tmp_path / "training" / "0a.json").write_text('{"train": [], "test": [{"input": [[1], [2, 3]], "output": [[1]]}]}')
    with pytest.raises(EnvError, match="not in ARC's form"):
        world.start(world.tasks("train")[0])
    with pytest.raises(EnvError, match="no tasks of ARC"):
        Arc(path=tmp_path / "none").tasks("test")


# --- bugs ------------------------------------------------------------------------------------------------------------


def test_each_function_is_in_normal_form_and_each_mutant_is_noticed() -> None:
    for name, (source, tests) in _LIBRARY.items():
        assert ast.unparse(ast.parse(source)) == source
        found = mutants(name)
        assert len(found) >= 2 and all(0 <= test < len(tests) for _, test, _ in found)
        assert all(ast.unparse(ast.parse(mutant)) == mutant != source for mutant, _, _ in found)


def test_a_bug_is_mended_by_its_line_and_by_nothing_else() -> None:
    world = Repair(n_train=20, n_dev=20, n_test=20)
    task = world.tasks("test")[0]
    bug = world.instance(task)
    plan = world.plan(task, ()) or ()
    opening, tested, edited_, passed, ended = play(world, task, ["test", plan[0], "test", "submit"])
    assert opening.reply.startswith("Test failed: ") and tested.reply.startswith("Test failed: ")
    assert edited_.reply.splitlines()[bug.at].endswith(bug.right) and passed.reply == "All tests pass."
    assert ended.success and plan == (f"replace {bug.at + 1}: {bug.right.strip()}", "submit")
    spelt = plan[0].replace("replace", "Replace").replace(":", " :", 1)
    assert play(world, task, [spelt, "Test", "Submit."])[-1].success and world.plan(task, [spelt, "Submit."]) == ()
    wrong = play(world, task, [f"replace {bug.at + 1}: import os; os._exit(0)", "replace 99: x", "submit"])
    assert not wrong[-1].success and wrong[-1].terminated and not wrong[2].valid
    for split in ("train", "dev"):
        others = {world.told(world.instance(t)) for t in world.tasks(split)}
        assert not others & {world.told(world.instance(t)) for t in world.tasks("test")}


# --- machine learning ------------------------------------------------------------------------------------------------

NEAREST = """```python
import csv
rows = [list(map(float, r)) for r in list(csv.reader(open('train.csv')))[1:]]
for r in list(csv.reader(open('test.csv')))[1:]:
    x = list(map(float, r))
    print(int(min(rows, key=lambda row: sum((a - b) ** 2 for a, b in zip(row, x)))[3]))
```"""


def test_labels_and_skill_worked_by_hand() -> None:
    assert [labelled("line", (0.5, -0.5, 0.2), row) for row in ((0.4, 0.1, 0), (0.1, 0.4, 0))] == [1, 0]
    assert [labelled("box", (0, 2), row) for row in ((0.6, 0.9, 0.6), (0.6, 0, 0.8))] == [1, 0]
    assert [labelled("cross", (0, 1), row) for row in ((-0.1, -0.2, 1), (-0.1, 0.2, 1))] == [1, 0]
    # Six of eight are 1: a constant has 6/8, seven right are (7/8 − 6/8) / (2/8) = ½.
    right = [1, 1, 1, 1, 1, 1, 0, 0]
    assert skill([1] * 8, right) == 0 and skill(right, right) == 1 and skill([1] * 7 + [0], right) == 0.5
    assert skill([0] * 8, right) == 0


def test_a_program_learns_without_the_labels() -> None:
    world = MlTask(rules=("box",), n_train=5, n_dev=5, n_test=5)
    task = world.tasks("test")[0]
    data = world.instance(task)
    assert b"label" not in data.files()["test.csv"] and len(data.files()["test.csv"].split()) == 41
    first, bad, ran, learnt, ended = play(
        world, task, ["```python\n1 / 0\n```", "```python\nprint(1)\n```", NEAREST, "submit"]
    )
    assert first.reply.startswith("train.csv has 60 lines") and "ZeroDivisionError" in bad.reply and bad.reward == 0
    assert "printed 1 words; expected 40" in ran.reply and ran.reward == pytest.approx(0.1)
    assert learnt.reward == pytest.approx(0.1) and 0.2 < ended.reward <= 0.8 and ended.success is not None
    assert not play(world, task, ["no program", "submit"])[1].valid
    assert play(world, task, world.plan(task, ()) or ())[-1].success
    assert world.plan(task, ["Submit."]) is None


# --- texts and verdicts ----------------------------------------------------------------------------------------------


def test_the_next_sentence_of_a_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"This is sentence {i}." for i in range(32)) + "\n\nNo end")
    world = NextSegment(path=path, context=2, after=1)
    [first, *_] = world.tasks("train")
    assert first.info["prompt"].startswith("This is sentence 0. This is sentence 1. [...] This is sentence 3.")
    assert first.reference == "This is sentence 2." and play(world, first, [first.reference])[-1].success
    asked = {
        split: {int(task.id.rpartition("/")[2]) for task in world.tasks(split)} for split in ("train", "dev", "test")
    }
    assert (
        max(asked["train"]) + 1 < 25 <= min(asked["dev"]) - 2 and max(asked["dev"]) + 1 < 29 <= min(asked["test"]) - 2
    )
    with pytest.raises(EnvError, match="no sentence to ask for"):
        NextSegment(path=path, context=9).tasks("test")
    with pytest.raises(EnvError, match="cannot be read"):
        NextSegment(path=tmp_path / "none").tasks("test")


@pytest.mark.parametrize("kind", ["arc", "next_segment", "conversations", "self_made"])
def test_files_are_looked_for_beside_the_recipe(kind: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    made: Any = build_environment({"kind": kind, "path": "there"}, "environment", base=tmp_path)
    assert made.path == tmp_path / "there"


def test_conversations_of_locomo_are_read_in_pieces(tmp_path: Path) -> None:
    said = [
        {"speaker": "Ann", "dia_id": "D1:1", "text": "I met Bo " + "and so on " * 8},
        {"speaker": "Bo", "text": "Yes."},
    ]
    talk = {"session_2": said, "session_10": said[1:], "session_2_date_time": "8 May", "speaker_a": "Ann"}
    asked = [{"question": "Whom did Ann meet?", "answer": "Bo", "category": 1}, {"question": "?", "category": 5}]
    path = tmp_path / "locomo.json"
    path.write_text(json.dumps([{"sample_id": f"conv-{i}", "conversation": talk, "qa": asked} for i in range(8)]))
    world = Conversations(path=path, piece_words=32)
    tasks = [task for split in ("train", "dev", "test") for task in world.tasks(split)]
    assert len(tasks) == 8 and json.loads(str(tasks[0].reference)) == ["Bo"]
    results = play(world, tasks[0], ["Bo", "next", "answer: Bo"])
    assert results[0].reply.startswith("[8 May]") and not results[1].valid
    text = "".join(r.reply for r in (results[0], results[2]))
    assert text.index("Ann: I met") < text.index("Bo: Yes.") < text.index("Whom did Ann meet?") and results[3].success
    plan = world.plan(tasks[0], ()) or ()
    assert plan == ("next", "answer: Bo") and play(world, tasks[0], plan)[-1].success
    path.write_text('[{"conversation": {"session_1": [{}]}, "qa": []}]')
    with pytest.raises(
        EnvError, match="this conversation has neither the format of LoCoMo nor that of MemoryAgentBench"
    ):
        world.tasks("train")


def test_conversations_of_memory_agent_bench_are_read_in_pieces() -> None:
    world = Conversations(path=Path(__file__).parent / "conversations.jsonl", piece_words=60)
    for task in (task for split in ("train", "dev", "test") for task in world.tasks(split)):
        plan = world.plan(task, ()) or ()
        assert len(plan) == 4 and play(world, task, plan)[-1].success  # 210 words in pieces of 60
    assert not play(world, task, [*plan[:-1], "no idea"])[-1].success
    assert world.plan(task, ["foo"] * 3) is None  # too few steps are left to read on and answer


def test_a_problem_is_written_then_answered_and_none_is_of_two_splits(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"question": f"What is {i} + 1?"}) + "\n" for i in range(40)))
    world = SelfMade(path=path, shown=2, max_chars=30, n_tasks=20)
    shown = {split: {p for t in world.tasks(split) for p in t.info["problems"]} for split in ("train", "dev", "test")}
    assert all(shown.values()) and not any(shown[a] & shown[b] for a, b in (("train", "dev"), ("train", "test")))
    task = world.tasks("train")[0]
    asked, answered = play(world, task, ["What is  7 - 2?", "5"])[-2:]
    assert asked.reply == "Your problem: What is 7 - 2?" and asked.valid and not asked.terminated
    assert answered.terminated and answered.valid and answered.success  # whether it is right a reward has to say
    for said in (task.info["problems"][0].upper(), "x" * 31):  # one that was shown, and one that is too long
        [wrong] = play(world, task, [said])[-1:]
        assert wrong.terminated and not wrong.valid and not wrong.success
    with pytest.raises(EnvError, match="too few problems"):
        SelfMade(path=path, shown=16).tasks("test")
    # In a recipe: the judge is a checkpoint, and is renewed by the policy.
    stage = {"kind": "policy_gradient", "group_size": 4, "judge_refresh": {"every": 2, "min_accuracy": 0.0}}
    judge = {"kind": "grade", "path": str(tmp_path), "scale": "yes_no", "unreadable": "wrong"}
    rewards = {"own": judge, "audit": {"kind": "invalid_action", "monitor": True}}
    recipe = {"name": "own", "policy": {"kind": "from_scratch"}, "limits": {"max_turns": 2}, "rewards": rewards}
    recipe |= {"environment": {"kind": "self_made", "path": str(path)}, "stages": [stage]}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert load(tmp_path / "recipe.yaml").environment == SelfMade(path=path)


def test_verdicts_are_asked_for_as_the_judge_asks(tmp_path: Path) -> None:
    world = Verdicts(path=COMPARED)
    tasks = [task for split in ("train", "dev", "test") for task in world.tasks(split)]
    assert len(tasks) == 20 * 2 + 20
    pairs = [task for task in tasks if task.info["mark"]]
    assert sorted({str(task.reference) for task in pairs}) == ["A", "B"] and len(pairs) == 40
    text = pairs[0].info["text"]
    assert Judge(url="http://x", model="m").question in text and "VERDICT" in text
    for task in (pairs[0], next(task for task in tasks if not task.info["mark"])):
        assert play(world, task, world.plan(task, ()) or ())[-1].success
        other = {"A": "B", "B": "A", "Yes": "No", "No": "Yes"}[str(task.reference)]
        assert not play(world, task, [f"VERDICT {task.info['mark']}: {other}"])[-1].success
        assert not play(world, task, ["VERDICT: A"])[-1].valid
    tie = play(world, pairs[0], [f"VERDICT {pairs[0].info['mark']}: TIE"])[-1]
    assert tie.valid and not tie.success and tie.reply == "Wrong."
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "chosen": "b"}\n')
    with pytest.raises(EnvError, match="neither a pair nor a label"):
        Verdicts(path=bad).tasks("train")


def test_labels_are_read_from_tables_too(tmp_path: Path) -> None:
    path, labels = tmp_path / "labels.csv", ("true", "False", "1", "0")
    rows = [f"p{i},r,it is short,{label}" for i, label in enumerate(labels)]
    path.write_text("\n".join(["prompt,response,principle,label", *rows]))
    world = Verdicts(path=path)
    found = {t.id.rpartition("/")[2]: t.reference for split in ("train", "dev", "test") for t in world.tasks(split)}
    assert [found[number] for number in sorted(found, key=int)] == ["Yes", "No", "Yes", "No"]
    path.write_text("prompt,response,principle,label\np,r,it is short,perhaps")
    with pytest.raises(EnvError, match="true, false, 1 or 0"):
        world.tasks("train")


# --- a colleague -----------------------------------------------------------------------------------------------------


def test_what_a_colleague_says_is_what_the_function_does() -> None:
    wanted = Wanted("fee", "weight", 20, True, ("always", 7), ("times", 3))
    assert [wanted.value(x) for x in (0, 19, 20, 21)] == [7, 7, 60, 63]
    assert [replace(wanted, is_above=False).value(x) for x in (19, 20, 21)] == [7, 7, 63]
    assert replace(wanted, below=("plus", 7)).value(19) == 26
    assert [wanted.told(one) for one in ("limit", "at", "below", "above")] == [
        "The limit is 20.",
        "The limit itself counts as above.",
        "Below the limit it is always 7.",
        "Above the limit it is 3 times weight.",
    ]
    assert wanted.program() == "def fee(weight): return 3 * weight if weight >= 20 else 7"


def test_a_program_is_run_on_calls_around_the_limit() -> None:
    world = Colleague(max_limit=10, **SMALL)
    task = world.tasks("test")[0]
    wanted, plan = world.instance(task), world.plan(task, ())
    assert plan is not None and len(plan) == 5 and plan[-1] == task.reference == wanted.program()
    *talk, last = play(world, task, plan)
    assert last.success and sum(step.reward for step in [*talk, last]) == 1 and all(step.valid for step in talk)
    # One of seven calls is at the limit itself, and the tasks are those where it matters.
    off = play(world, task, [replace(wanted, is_above=not wanted.is_above).program()])[-1]
    assert off.reward == pytest.approx(6 / 7) and not off.success
    fenced = f"So:\n```python\n{wanted.program()}\n```"
    assert play(world, task, ["hm", fenced])[-1].success and not play(world, task, ["hm"])[-1].valid
    agent: Any = load_suite("colleague").parts[0].agent
    lines = wanted.program().replace(": return", ":\n    return")
    written = agent.read(f"<think>\nEasy.\n</think>\n\n{lines}")
    assert "\n" in written.text and play(world, task, [written.text])[-1].success
    argued = agent.read("Where is the border?\n\n`ask limit`")
    assert play(world, task, [argued.text])[-1].reply.startswith("The limit is")
    for broken in ("def fee(", f"def {wanted.name}(x): return open('/etc/passwd').read()"):
        assert play(world, task, [broken])[-1].reward == 0
    assert world.plan(task, ["ask at"] * 5) == (wanted.program(),) and world.plan(task, ["ask at"] * 6) is None
    assert world.plan(task, [wanted.program()]) == () and world.plan(task, ["def f(): 1"]) is None
    shown = play(world, task, plan[:-1])
    assert all(wanted.program() not in step.reply for step in shown), "nobody shows the program"


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [Hierarchy(**SMALL), TableQuestions(**SMALL), Routing(**SMALL), Arc(**SMALL)])
def test_the_oracle_solves_all_and_chance_few(world: Any) -> None:
    assert oracle_play(world, 60)[0] == 60
    if world.start(world.tasks("test")[0]).opening.admissible_actions:
        assert random_play(world, 60)[0] < 45
    task: Task = world.tasks("test")[0]
    assert not play(world, task, ["something else"])[-1].success
