"""Told before a run on a file of one's own trains: sizes, prompts that are too long, verifiers that overdo."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from agents.chat import ChatAgent
from environments.tasks.dataset import Dataset
from rlhf.build.alone import check_alone
from rlhf.build.preflight import try_once
from rlhf.build.reference_trial import try_references
from rlhf.build.task_summary import tell_splits
from rlhf.build.train import train
from rlhf.data import Action, Outcome, Task, Trajectory, Turn
from rlhf.errors import EnvError, RecipeError, RewardError, TrainingError
from rlhf.estimate.arithmetic import arithmetic
from rlhf.gateway.environment import External
from rlhf.recipe import load
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.scoring import score_group
from rlhf.terminal import CleanConsole
from tests.environments.test_dataset import lines, recipe
from tests.training import runs, tiny

RIGHT = {"right": {"kind": "numeric"}}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(tiny.policy().tokenizer)


def told(path: Path, renderer: Renderer, max_context: int, **limits: int) -> list[str]:
    said: list[str] = []
    made = load(path, [f"limits.{name}={value}" for name, value in limits.items()])
    asyncio.run(tell_splits(made, renderer, max_context, said.append))
    return said


def test_sizes_of_the_splits_are_told(tmp_path: Path, renderer: Renderer) -> None:
    [sizes] = told(recipe(tmp_path, RIGHT), renderer, 1000)
    counted = [int(part.split()[0]) for part in sizes.removeprefix("tasks: ").split(", ")]
    assert sizes.startswith("tasks: ") and sizes.endswith(" in test") and sum(counted) == 36
    assert told(recipe(tmp_path, RIGHT) and tmp_path / "sums.yaml", renderer, 1000) == [sizes]


def test_rows_that_are_one_task_with_an_earlier_one_are_counted(tmp_path: Path, renderer: Renderer) -> None:
    rows = [{"question": q, "answer": a} for q, a in (("1", 1), ("1", 1), ("2", 2), ("1", 7), (" 1 ", 1))]
    lines(tmp_path / "a.jsonl", rows)
    lines(tmp_path / "b.jsonl", [{"question": "3", "answer": 3}])
    path = recipe(tmp_path, RIGHT, path=None, train="a.jsonl", test="b.jsonl")
    said = [
        "tasks: 3 in train, 1 in test",
        "caution: rows with the prompt and the answer of an earlier row: 2 in train; each is one task with that row, "
        "and counts once",
    ]
    assert told(path, renderer, 1000) == said
    plain, values = {"kind": "dataset", "train": "a.jsonl", "test": "b.jsonl"}, yaml.safe_load(path.read_text())
    apart = {"kind": "worker_processes", "environment": plain, "n_workers": 0}
    path.write_text(yaml.safe_dump(values | {"environment": apart}))
    assert told(path, renderer, 1000) == said
    share: Any = {"environment": plain}
    path.write_text(yaml.safe_dump(values | {"environment": {"kind": "mixed", "parts": {"one": share, "two": share}}}))
    assert told(path, renderer, 1000) == ["tasks: 6 in train, 2 in test", said[1].replace("2 in", "4 in")]


def test_prompts_that_fill_the_context_or_leave_little_of_it_are_counted(tmp_path: Path, renderer: Renderer) -> None:
    path = recipe(tmp_path, RIGHT, path=None, train="a.jsonl", test="b.jsonl")
    lines(tmp_path / "a.jsonl", [{"question": "1 " * n, "answer": 1} for n in (1, 2, 30, 60)])
    lines(tmp_path / "b.jsonl", [{"question": "2", "answer": 2}])
    short, medium, long = (renderer_length(renderer, "1 " * n) for n in (2, 30, 60))
    sizes, full, tight = told(path, renderer, long, max_tokens=long - medium + 1)
    assert sizes == "tasks: 4 in train, 1 in test"
    assert f"1 of 4 prompts of train fill the context of {long} tokens" in full and "row 4" in full
    assert "1 of 4 prompts of train leave less than limits.max_tokens" in tight and "row 3" in tight
    assert told(path, renderer, long + long - short) == [sizes]
    with pytest.raises(RecipeError, match="no prompt leaves room"):
        told(path, renderer, 2, max_tokens=1)


def renderer_length(renderer: Renderer, text: str) -> int:
    from rlhf.data import Message, Role

    return renderer.prompt([Message(Role.USER, text)]).n_tokens


@pytest.mark.parametrize(
    ("says", "told_of"),
    [
        ("100.0", "the value exceeds the presumed value of a correct answer; success_threshold sets it"),
        ("float('nan')", "no finite number"),
        ("None", "no finite number"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_verifier_that_says_what_it_cannot_fails_before_anything_is_trained(
    tmp_path: Path, says: str, told_of: str
) -> None:
    path = recipe(tmp_path, {"right": {"kind": "./odd.py:judge"}})
    (tmp_path / "odd.py").write_text(
        f"def judge(answer: str, reference: str) -> float:\n    return {says} if reference in answer else 0.0\n"
    )
    with pytest.raises(RewardError) as refused:
        asyncio.run(try_references(load(path), lambda text: None))
    assert "rewards.right" in refused.value.where and told_of in str(refused.value), refused.value


def test_a_value_above_1_is_the_failure_of_the_reward_unless_success_threshold_says_its_scale(tmp_path: Path) -> None:
    (tmp_path / "points.py").write_text("def judge(answer: str, reference: str) -> float:\n    return 7.0\n")
    reply = Trajectory("t/1", 0, "", (Turn(Action("3", reply_text="3"), ""),), Outcome.FAILED)
    for keys, solved in (({}, None), ({"success_threshold": 5}, True), ({"success_threshold": 10}, False)):
        made = load(recipe(tmp_path, {"right": {"kind": "./points.py:judge", **keys}}))
        group = asyncio.run(score_group(Task("t/1", reference="3"), [reply], made.rewards))
        assert [t.solved for t in group.trajectories] == ([] if solved is None else [solved])
        assert [f.outcome for f in group.failures] == ([Outcome.REWARD_ERROR] if solved is None else [])


def test_a_run_keeps_to_what_was_not_said(tmp_path: Path) -> None:
    from rlhf.recipe import dump

    kept = tmp_path / "again.yaml"
    made: Any = load(recipe(tmp_path, RIGHT))
    kept.write_text(dump(made))
    assert load(kept).rewards["right"].max_value == made.rewards["right"].max_value == 1.0


def test_a_whole_document_that_does_not_fit_into_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with large.open("w") as file:
        file.write("[]")
        file.truncate(1 << 40)  # it takes no room on the disk
    with pytest.raises(EnvError, match="does not fit into memory") as refused:
        Dataset(path=large).tasks("train")
    assert refused.value.where == "environment.path" and "JSON lines" in str(refused.value)


def test_the_first_rows_of_a_large_file_are_all_that_is_read(tmp_path: Path) -> None:
    large = tmp_path / "large.jsonl"
    with large.open("w") as file:
        file.write('{"question": "a", "answer": 1}\n' * 3)
        file.truncate(1 << 40)
    [task] = Dataset(train=large, max_rows=3).tasks("train")
    assert task.reference == "1"


def test_demonstrations_longer_than_the_context_are_left_out_and_counted(tmp_path: Path) -> None:
    path = recipe(tmp_path, RIGHT, path=None, train="a.jsonl", test="b.jsonl")
    long = [{"question": f"long {n}", "answer": "1 " * 70} for n in range(3)]
    lines(tmp_path / "a.jsonl", [*long, *({"question": f"1 {n}", "answer": 1} for n in range(9))])
    lines(tmp_path / "b.jsonl", [{"question": "2", "answer": 2}])
    short = ["stages.0.n_demonstrations=12", "stages.0.epochs=1", "stages.1.steps=1", "rewards.right.kind=exact_match"]
    console = CleanConsole(file=io.StringIO(), width=1000)
    train(load(path, short), tmp_path / "run", console=console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3 of 12 demonstrations are longer than the context of 64 tokens" in said
    assert "tasks: 12 in train, 1 in test" in said
    with pytest.raises(TrainingError, match="no demonstration fits"):
        train(load(path, [*short, "environment.max_rows=3", "stages.0.n_demonstrations=3"]), tmp_path / "other")


def test_answers_that_the_limit_cuts_are_scored_as_they_stand_and_counted(tmp_path: Path) -> None:
    path = recipe(tmp_path, {"right": {"kind": "./any.py:judge"}})
    judge = "def judge(answer: str, reference: str) -> float:\n    return float(answer != '' and answer != '{}')\n"
    (tmp_path / "any.py").write_text(judge.format("colourless green ideas"))
    short = ["limits.max_tokens=1", "stages.0.n_demonstrations=4", "stages.0.epochs=1", "stages.1.steps=1"]
    done = train(load(path, short), tmp_path / "run")
    names = ("n_truncated_generations", "success")
    [cut], [success] = (runs.curve(Path(done["run"]), f"rollout/{name}") for name in names)
    assert cut > 8 and success * 16 >= cut - 4  # what was cut is an answer, unless it is a blank
    read = ChatAgent(system="", format="text", think="allow").read
    assert read("4", was_cut=True).text == "4"
    assert read("<think> 4", was_cut=True).error is not None  # no answer yet: the verifier is asked about an empty one


def test_a_single_reference_that_the_verifier_cannot_read_is_named(tmp_path: Path) -> None:
    path = recipe(tmp_path, RIGHT, path=None, train="a.jsonl", test="b.jsonl")
    rows = [{"question": f"long {n}", "answer": "many" if n == 33 else n} for n in range(40)]
    lines(tmp_path / "a.jsonl", rows)
    lines(tmp_path / "b.jsonl", [{"question": "2", "answer": 2}])
    said: list[str] = []
    asyncio.run(try_references(load(path), said.append))
    assert said[0] == "rewards.right takes 39 of the first 40 references of train for right: 97.5%"
    assert len(said) == 3 and "for wrong: 'many'" in said[1] and "row 34): worth 0 of 1" in said[1]


def test_a_row_without_a_reference_is_named(tmp_path: Path) -> None:
    path = recipe(tmp_path, RIGHT, path=None, train="a.jsonl", test="b.jsonl")
    lines(tmp_path / "a.jsonl", [{"question": f"long {n}", "answer": None if n == 7 else n} for n in range(20)])
    lines(tmp_path / "b.jsonl", [{"question": "2", "answer": 2}])
    said: list[str] = []
    asyncio.run(try_references(load(path), said.append))
    assert "1 of the first 20 tasks of train have none" in said[0] and "row 8" in said[0]
    assert said[1] == "rewards.right takes 19 of the first 19 references of train for right: 100.0%"


@pytest.mark.parametrize(("right", "n_right"), [("int(reference) > 4", 21), ("int(reference) == 10", 1), ("True", 36)])
def test_the_share_of_references_that_are_right_is_told_with_three_that_are_not(
    tmp_path: Path, right: str, n_right: int
) -> None:
    path = recipe(tmp_path, {"right": {"kind": "./mine.py:judge"}}, split_ratios={"train": 1.0})
    judge = f"def judge(answer: str, reference: str) -> float:\n    return float(answer == reference and ({right}))\n"
    (tmp_path / "mine.py").write_text(judge)
    said: list[str] = []
    asyncio.run(try_references(load(path, ["evaluation.split=train"]), said.append))
    # of a + b with a and b from 0 to 5: 36 sums: 1 + 2 + ... + 6 = 21 are 5 or more, one is 10
    assert said[0] == f"rewards.right takes {n_right} of the first 36 references of train for right: {n_right / 36:.1%}"
    assert sum("takes a reference for wrong" in line for line in said) == (3 if n_right < 36 else 0)
    assert len(said) == (5 if n_right < 36 else 1)


def test_a_verifier_that_takes_no_reference_for_right_is_refused_unless_the_limits_say_otherwise(
    tmp_path: Path,
) -> None:
    path = recipe(tmp_path, {"right": {"kind": "./mine.py:judge"}})
    (tmp_path / "mine.py").write_text("def judge(answer: str, reference: str) -> float:\n    return 0.0\n")
    with pytest.raises(RewardError, match="the reward accepts none of the first") as refused:
        train(load(path), tmp_path / "run")
    assert refused.value.where == "rewards.right" and refused.value.got.count("row") == 3
    said: list[str] = []
    asyncio.run(try_references(load(path, ["limits.max_error_fraction=1"]), said.append))
    assert "takes 0 of the first" in said[0] and len(said) == 5


def test_at_most_512_references_are_tried_and_a_slow_verifier_is_given_some_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(tmp_path, {"right": {"kind": "./mine.py:judge"}}, path=None, train="a.jsonl", test="b.jsonl")
    lines(tmp_path / "a.jsonl", [{"question": f"{n}?", "answer": n} for n in range(600)])
    lines(tmp_path / "b.jsonl", [{"question": "a?", "answer": 2}])
    (tmp_path / "mine.py").write_text(
        "def judge(answer: str, reference: str) -> float:\n    return float(answer == reference)\n"
    )
    said: list[str] = []
    asyncio.run(try_references(load(path), said.append))
    monkeypatch.setattr("rlhf.build.reference_trial._ENOUGH_S", 0.0)
    asyncio.run(try_references(load(path), said.append))
    assert [line.split(" references")[0] for line in said] == [
        "rewards.right takes 512 of the first 512", "rewards.right takes 1 of the first 1",
    ]  # fmt: skip


def test_prompts_that_are_all_too_long_are_told_of_before_anything_is_demonstrated(tmp_path: Path) -> None:
    path = recipe(tmp_path, RIGHT, path=None, train="a.jsonl", test="b.jsonl")
    lines(tmp_path / "a.jsonl", [{"question": f"{n} plus one" + " and so on" * 40, "answer": n} for n in range(9)])
    lines(tmp_path / "b.jsonl", [{"question": "2", "answer": 2}])
    with pytest.raises(RecipeError, match="no prompt leaves room"):
        train(load(path), tmp_path / "run", console=CleanConsole(file=io.StringIO()))
    assert not (tmp_path / "run" / "demonstrations").exists()


def test_episodes_of_the_evaluation_are_no_more_than_the_split_has(tmp_path: Path) -> None:
    path = recipe(tmp_path, RIGHT, path=None, train="a.jsonl", test="b.jsonl")
    lines(tmp_path / "a.jsonl", [{"question": "1", "answer": 1}])
    lines(tmp_path / "b.jsonl", [{"question": str(n), "answer": n} for n in range(2, 9)])
    wanted = ["evaluation.n_tasks=200", "evaluation.attempts=2"]
    assert arithmetic(load(path, wanted))["evaluation"]["n_episodes"] == 14
    assert arithmetic(load(path, ["evaluation.n_tasks=5"]))["evaluation"]["n_episodes"] == 5


@pytest.mark.parametrize(
    ("right", "says"),
    [
        ("1.0", ["takes the reply 'colourless green ideas' for right", "31 of the first 31"]),
        ("float(said.strip() == answer[0])", ["31 of the first 31"]),
        ("0.0", ["0 of the first 31", "for wrong", "for wrong", "for wrong", "fix rewards.right"]),
        ("len(columns['level'])", ["0 of the first 31", "KeyError", "KeyError", "KeyError", "fix rewards.right"]),
    ],
)
def test_a_function_of_trl_is_tried_on_nonsense_and_references_and_only_cautioned_of(
    tmp_path: Path, right: str, says: list[str]
) -> None:
    path = recipe(tmp_path, {"right": {"kind": "./mine.py:score"}})
    judge = f"def score(completions, answer, **columns):\n    return [{right} for said in completions]\n"
    (tmp_path / "mine.py").write_text(judge)
    said: list[str] = []
    asyncio.run(try_references(load(path), said.append))
    assert len(said) == len(says) and all(part in line for part, line in zip(says, said, strict=True)), said


@pytest.mark.parametrize(("value", "n_said"), [("1.0", 1), ("float('7' in trajectory.turns[-1].action.text)", 0)])
def test_a_reward_of_task_and_trajectory_is_tried_on_nonsense(tmp_path: Path, value: str, n_said: int) -> None:
    path, said = recipe(tmp_path, {"right": {"kind": "./mine.py:reward"}}), list[str]()
    (tmp_path / "mine.py").write_text(f"def reward(task, trajectory):\n    return {value}\n")
    asyncio.run(try_references(load(path), said.append))
    assert len(said) == n_said and all("rewards.right takes the reply 'colourless green" in line for line in said)


def test_a_function_of_trl_finds_ids_in_both_trials(tmp_path: Path) -> None:
    path, said = recipe(tmp_path, {"right": {"kind": "./mine.py:score"}}), list[str]()
    text = "def score(completions, completion_ids, **columns):\n    return [ids[-1] / 1000 for ids in completion_ids]\n"
    (tmp_path / "mine.py").write_text(text)
    asyncio.run(try_references(load(path), said.append))
    asyncio.run(try_once(load(path), said.append))
    assert not any("IndexError" in line for line in said)


def test_a_function_of_verl_that_takes_anything_is_cautioned_of_and_one_that_takes_nothing_refused(
    tmp_path: Path,
) -> None:
    score = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {'score': SCORE}\n"
    for name, value in (("one", "1.0"), ("none", "0.0")):
        path, said = recipe(tmp_path, {"right": {"kind": f"./{name}.py:compute_score"}}), list[str]()
        (tmp_path / f"{name}.py").write_text(score.replace("SCORE", value))
        if name == "one":
            asyncio.run(try_references(load(path), said.append))
            assert "'colourless green ideas' for right" in said[0] and len(said) == 2
            continue
        with pytest.raises(RewardError, match="accepts none of the first"):
            asyncio.run(try_references(load(path), said.append))


@pytest.mark.parametrize(("right", "says"), [("0.0", "was given no reference in every form"), ("1.0", "for right")])
def test_every_call_of_a_slow_verifier_counts_and_it_is_said_to_be_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: str, says: str
) -> None:
    path, calls = recipe(tmp_path, {"right": {"kind": "./mine.py:Judge"}}), tmp_path / "calls"
    (tmp_path / "mine.py").write_text(
        "import time\n\nclass Judge:\n    slow_s = 0.05\n\n"
        "    def __call__(self, answer: str, reference: str) -> float:\n"
        f"        open({str(calls)!r}, 'a').write('x')\n        time.sleep(0.2)\n"
        f"        return {right} * answer.endswith(reference)\n"
    )
    monkeypatch.setattr("rlhf.build.reference_trial._ENOUGH_S", 1.0)
    said: list[str] = []
    asyncio.run(try_references(load(path), said.append))
    assert "caution: rewards.right is slow: 0.2 s per call" in said[0] and "under 0.05 s" in said[0]
    assert says in said[1] and len(said) == 2
    assert len(calls.read_text()) <= 1.0 / 0.2 + 2


def test_what_fails_is_named_with_the_command_that_tries_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(tmp_path, {"right": {"kind": "./mine.py:Judge", "digits": 3}})
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n\n@dataclass(frozen=True)\nclass Judge:\n    digits: int = 2\n"
        "    strict: bool = False\n\n    def __call__(self, answer: str, reference: str) -> float:\n"
        "        raise ValueError('no')\n"
    )
    monkeypatch.chdir(tmp_path)
    for trial in (try_references, try_once):
        with pytest.raises(RewardError) as error:
            asyncio.run(trial(load(path), lambda text: None))
        alone = "`rlhf check reward ./mine.py:Judge digits=3`"
        assert error.value.hint == f"fix it, and try it alone: {alone}, or at these tasks: `rlhf check recipe FILE`"


def test_the_command_has_no_default_of_a_part_within_the_part() -> None:
    outer = External(environment=Dataset(path=Path("q.jsonl")), command=("agent",))
    said = check_alone("environment", outer)
    keys = """'environment={"kind": "dataset", "path": "q.jsonl"}' 'command=["agent"]'"""
    assert said == f"alone: `rlhf check environment external {keys}`"
