"""`rlhf tune`: which runs go on, and what is refused; once with runs."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.commands.tune import Choice, Tuning, _ends, _result, _show, _slug, choices_of, rounds
from rlhf.errors import RecipeError
from rlhf.recipe import load
from tests import recipe_parts
from tests.commands import last_json, program, run
from tests.test_compare import questions, write


def test_commas_part_values_outside_of_brackets_alone() -> None:
    found = choices_of(["stages.0.advantage={kind: gae, lam: 1.0},{kind: grpo}", "limits.max_tokens=2,3"])
    assert len(found) == 4
    assert found[0] == ("stages.0.advantage={kind: gae, lam: 1.0}", "limits.max_tokens=2")


@pytest.mark.parametrize(
    ("tried", "said"),
    [
        ([], "no --try"),
        (["stages.0.group_size=2,"], "stages.0.group_size=2,"),
        (["seed=1,2"], "a key that defines the comparison"),
        (["stages.0.steps=1,2"], "a key that defines the comparison"),
        (["environment.rows=2,3"], "a key that defines the comparison"),
        (["a=1", "a=2"], "a key twice"),
    ],
)
def test_what_is_no_choice_is_refused(tried: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match="--try") as caught:
        choices_of(tried)
    assert said in str(caught.value)


def test_what_is_trained_on_is_a_choice() -> None:
    tried = ["environment.n_train=9,99", "environment.train=a.jsonl,b.jsonl", "stages.0.environment.rows=2,3"]
    assert len(choices_of(tried)) == 8


@pytest.mark.parametrize(("n", "steps", "keep"), [(2, 40, 3), (3, 40, 3), (10, 36, 3), (17, 5, 2)])
def test_each_round_has_fewer_choices_and_more_steps_and_the_last_one_all(n: int, steps: int, keep: int) -> None:
    plan = rounds(n, steps, keep)
    assert plan[0][0] == n and plan[-1][1] == steps
    assert [-(-size // keep) for size, _ in plan] == [*(size for size, _ in plan[1:]), 1]
    assert all(0 < one[1] <= other[1] for one, other in itertools.pairwise(plan))


def test_a_value_that_the_recipe_has_is_not_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuning = tuning_of(tmp_path)
    size = tuning.loaded.stages[1].group_size
    same, other = (f"stages.1.group_size={size}",), (f"stages.1.group_size={size + 1}",)
    assert tuning.distinct([same, other, other]) == [(), other]
    said = " ".join(capsys.readouterr().err.split())
    assert f"{same[0]}: the same as the recipe as it is, and left out" in said
    with pytest.raises(RecipeError, match="a value that the recipe does not have"):
        tuning.distinct([same])


def tuning_of(folder: Path, *, seeds: int = 2) -> Tuning:
    recipe = str(recipe_parts.write(folder))
    return Tuning(recipe, (), load(recipe), folder / "tuned", seeds)


def test_the_best_mean_over_the_seeds_goes_on_and_ties_go_to_the_earlier(tmp_path: Path) -> None:
    tuning = tuning_of(tmp_path)
    choices: list[Choice] = [(), ("stages.1.group_size=2",), ("stages.1.group_size=3",)]
    tuning.check(choices, 4)
    record = json.loads((tmp_path / "tuned" / "tune.json").read_text())
    for choice, success in zip(choices, [(0.5, 0.5), (0.9, 0.0), (0.2, 0.8)], strict=True):
        record["success"] |= {f"{_slug(choice)}-seed{seed}@4": value for seed, value in enumerate(success)}
    (tmp_path / "tuned" / "tune.json").write_text(json.dumps(record))
    assert tuning.best(choices, 4, 2) == [(), choices[2]]


def test_a_schedule_that_each_round_stretches_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuning = tuning_of(tmp_path)
    falling: list[Choice] = [(f"stages.1.optimizer={{lr: {lr}, schedule: linear}}",) for lr in (1e-3, 1e-4)]
    tuning.check([(), ("stages.1.group_size=2",)], 1)
    assert not capsys.readouterr().err
    again = replace(tuning, out=tmp_path / "again")
    again.check([(), *falling], again.steps)
    assert not capsys.readouterr().err, "the only round has all steps"
    again = replace(tuning, out=tmp_path / "third")
    again.check([(), *falling], 1)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("the linear schedule of optimizer falls over the steps of each round, 1 in the first and") == 1


def test_a_choice_that_is_no_recipe_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    tuning = tuning_of(tmp_path)
    with pytest.raises(RecipeError, match="group_sise"):
        tuning.check([(), ("stages.1.group_sise=2",)], 4)
    assert not (tmp_path / "tuned").exists()
    with pytest.raises(RecipeError, match="opponents") as caught:
        nim = load("textarena/nim-opponents")
        Tuning("textarena/nim-opponents", (), nim, tmp_path / "tuned", 1).check([()], 3)
    assert "3 of 30 steps" in caught.value.got and "--reduction-factor" in caught.value.hint


@pytest.mark.parametrize(
    ("choice", "key"),
    [
        ("limits.max_turns=2", "limits.max_turns 2, in the recipe 3"),
        ("limits={max_turns: 3, max_generations_per_turn: 2, max_tokens: 8}", "limits.max_generations_per_turn"),
        ("rewards.right.success_threshold=0.5", "solved_by.success_threshold"),
        (
            "rewards.right={kind: outcome, success_threshold: 1.0}",
            "solved_by.kind outcome, in the recipe parts.py:solved",
        ),
        ("rewards={other: {kind: outcome}}", "solved_by.kind the environment"),
        ("rewards.right.weight=2.0", ""),
        ("rewards.short={kind: turn_cost, cost: 0.1}", ""),
        ("limits.max_tokens=4", ""),
    ],
)
def test_no_choice_changes_what_decides_success(tmp_path: Path, choice: str, key: str) -> None:
    tuning = tuning_of(tmp_path)
    own = ("rewards.right.success_threshold=1.0",)
    tuning = replace(tuning, overrides=own, loaded=load(tuning.recipe, list(own)))
    if not key:
        tuning.check([(), (choice,)], 4)
        return
    with pytest.raises(RecipeError, match="a choice changes how success is defined") as refused:
        tuning.check([(), (choice,)], 4)
    assert key in refused.value.got and not (tmp_path / "tuned").exists()


def test_the_verifier_that_decides_where_nothing_says_so_is_no_choice(tmp_path: Path) -> None:
    recipe = str(questions(tmp_path))
    split = ("environment.split_ratios={train: 0.5, dev: 0.2, test: 0.3}",)
    tuning = Tuning(recipe, split, load(recipe, list(split)), tmp_path / "tuned", 1)
    tuning.check([(), ("rewards.short.weight=0.1",)], 4)
    with pytest.raises(RecipeError, match="a choice changes how success is defined") as refused:
        tuning.check([(), ("rewards.right={kind: math}",)], 4)
    assert refused.value.got == "solved_by.kind math, in the recipe exact_match"


def test_tasks_that_choose_cannot_judge(tmp_path: Path) -> None:
    recipe = str(recipe_parts.write(tmp_path))
    same = ("evaluation.split=dev",)
    with pytest.raises(RecipeError, match="need different tasks") as refused:
        Tuning(recipe, same, load(recipe, list(same)), tmp_path / "tuned", 1).check([()], 4)
    assert refused.value.hint == "evaluation.split=test"
    mended = (*same, refused.value.hint)
    Tuning(recipe, mended, load(recipe, list(mended)), tmp_path / "tuned", 1).check([()], 4)


def test_it_selects_by_the_split_that_the_recipe_names(tmp_path: Path) -> None:
    recipe = str(recipe_parts.write(tmp_path))
    named = ("evaluation.validation_split=train", "evaluation.allow_overlap=true")
    tuning = Tuning(recipe, named, load(recipe, list(named)), tmp_path / "tuned", 1)
    tuning.check([(), ("stages.1.group_size=2",)], 4)
    assert load(recipe, [*named, *tuning.held_out()]).evaluation.split == "train"


def test_a_stage_that_would_end_early_is_tuned_to_its_end(tmp_path: Path) -> None:
    recipe = str(recipe_parts.write(tmp_path))
    patient = ("stages.1.evaluate_every=1", "stages.1.patience=1")
    tuning = Tuning(recipe, patient, load(recipe, list(patient)), tmp_path / "tuned", 1)
    tuning.check([(), ("stages.1.group_size=2",)], 4)
    assert load(recipe, [*patient, *tuning.held_out()]).stages[1].patience is None
    chosen = patient[1:]
    tuning = Tuning(recipe, patient[:1], load(recipe, list(patient[:1])), tmp_path / "choosing", 1)
    tuning.check([(), chosen], 4)
    assert load(recipe, [*patient, *tuning.held_out(chosen)]).stages[1].patience is None


@pytest.mark.parametrize(("more", "left"), [("", None), (", max_kl: 0.5", 0.5), (", every: 2, max_kl: 0.5", 0.5)])
def test_a_reference_that_is_reset_by_evaluations_is_tuned_without(
    tmp_path: Path, more: str, left: float | None
) -> None:
    recipe = str(recipe_parts.write(tmp_path))
    given = ("stages.1.evaluate_every=1", "stages.1.loss={kind: ppo_clip, kl: k3, kl_coef: 0.01}")
    given = (*given, f"stages.1.reference_reset={{patience: 1{more}}}")
    tuning = Tuning(recipe, given, load(recipe, list(given)), tmp_path / "tuned", 1)
    tuning.check([(), ("stages.1.group_size=2",)], 4)
    found = load(recipe, [*given, *tuning.held_out()]).stages[1].reference_reset
    assert (found and (found.patience, found.max_kl)) == (left and (None, left))


def test_a_run_that_was_killed_is_skipped_with_a_hint_to_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(program(tmp_path, "kill -9 $$")))
    assert not _ends(["recipe"], tmp_path)
    said = " ".join(capsys.readouterr().err.split())
    assert "was ended by SIGKILL" in said and "memory" in said and "--resume" not in said and "others" not in said


def test_servers_of_evaluations_in_between_are_none_where_there_are_none(tmp_path: Path) -> None:
    recipe = str(recipe_parts.write(tmp_path))
    ray = ("engine.kind=vllm", "asynchrony.staleness=1", "cluster={rollout_workers: 1, servers: 1, eval_servers: 1}")
    given = (*ray, "stages.1.evaluate_every=1")
    tuning = Tuning(recipe, given, load(recipe, list(given)), tmp_path / "tuned", 1)
    tuning.check([(), ("stages.1.group_size=2",)], 4)
    assert load(recipe, [*given, *tuning.held_out()]).cluster.eval_servers == 0


def test_data_without_tasks_to_choose_by_is_told_the_setting_that_makes_some(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"is {i}?", "reference": str(i)}) for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    values = {
        "policy": {"kind": "from_scratch"},
        "environment": {"kind": "dataset", "path": "rows.jsonl", "split_ratios": {"train": 0.5, "test": 0.5}},
        "rewards": {"right": {"kind": "exact_match"}},
        "limits": {"max_tokens": 4},
        "stages": [{"kind": "policy_gradient"}],
    }
    recipe = str(tmp_path / "own.yaml")
    Path(recipe).write_text(json.dumps(values))
    with pytest.raises(RecipeError) as refused:
        Tuning(recipe, (), load(recipe), tmp_path / "tuned", 1).check([()], 4)
    assert refused.value.where == "evaluation.validation_split" and refused.value.got == "dev"
    assert "environment.split_ratios" in refused.value.hint and "environment.dev: FILE" in refused.value.hint
    three = "environment.split_ratios={train: 0.5, dev: 0.2, test: 0.3}"
    Tuning(recipe, (three,), load(recipe, [three]), tmp_path / "tuned", 1).check([()], 4)


def test_the_folder_of_another_tuning_is_refused(tmp_path: Path) -> None:
    tuning = tuning_of(tmp_path)
    tuning.check([()], 4)
    (tmp_path / "tuned" / "tune.json").write_text(json.dumps({"asked": ["another.yaml"], "success": {}}))
    with pytest.raises(RecipeError, match="another recipe was tuned"):
        tuning.check([()], 4)


def test_the_folder_of_the_recipe_before_a_change_is_refused(tmp_path: Path) -> None:
    tuning = tuning_of(tmp_path)
    tuning.check([()], 4)
    tuning.check([()], 4)
    longer = load(tuning.recipe, ["limits.max_tokens=9"])
    with pytest.raises(RecipeError, match=r"other values of limits\.max_tokens"):
        replace(tuning, loaded=longer).check([()], 4)


def test_a_search_that_goes_on_with_an_edited_file_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuning = tuning_of(tmp_path)
    for _ in range(2):
        tuning.check([()], 4)
    assert "has changed" not in capsys.readouterr().err
    with (tmp_path / "parts.py").open("a") as file:
        file.write("# another line\n")
    tuning.check([()], 4)
    said = " ".join(capsys.readouterr().err.split())
    assert "parts.py (rewards.right.kind) has changed since this search began" in said


def test_a_search_with_other_choices_or_rounds_is_refused(tmp_path: Path) -> None:
    tuning = tuning_of(tmp_path)
    tuning.check([(), ("stages.1.group_size=2",)], 4)
    tuning.check([(), ("stages.1.group_size=2",)], 4)
    for choices, first in (([(), ("stages.1.group_size=2",), ("stages.1.group_size=4",)], 4), ([()], 4)):
        with pytest.raises(RecipeError, match="another search was begun") as refused:
            tuning.check(choices, first)
        assert refused.value.got.startswith("choices ") and "first round" not in refused.value.got
    with pytest.raises(RecipeError, match="another search was begun"):
        tuning.check([(), ("stages.1.group_size=2",)], 2)
    with pytest.raises(RecipeError, match="another search was begun"):
        replace(tuning, seeds=tuning.seeds + 1).check([(), ("stages.1.group_size=2",)], 4)


def test_a_folder_whose_record_has_old_names_of_keys_is_continued(tmp_path: Path) -> None:
    tuning = tuning_of(tmp_path)
    tuning.check([()], 4)
    record = json.loads((tmp_path / "tuned" / "tune.json").read_text())
    limits, judge = record["recipe"]["limits"], record["recipe"]["evaluation"]
    limits["max_calls"] = limits.pop("max_generations_per_turn")
    judge["watch_split"] = judge.pop("validation_split")
    (tmp_path / "tuned" / "tune.json").write_text(json.dumps(record))
    tuning.check([()], 4)
    with pytest.raises(RecipeError, match=r"other values of limits\.max_tokens"):
        replace(tuning, loaded=load(tuning.recipe, ["limits.max_tokens=9"])).check([()], 4)


def test_a_task_counts_once_with_however_many_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning = replace(tuning_of(tmp_path), seeds=3)
    n_more = {3: 6, 4: 3, 5: 0}  # of 6 tasks, those that only the other one solves, by seed

    def trained(self: Tuning, run: Path, choice: Choice, seed: int, *_: object) -> float:
        solved = {f"t/{i}": [bool(choice) and i < n_more[seed]] for i in range(6)}
        write(run, solved, stage="after", is_run=True)
        return 0.0

    monkeypatch.setattr(Tuning, "_trained", trained)
    choice = ("limits.max_tokens=9",)
    judged = tuning.judged(choice)
    found = _result(tuning, choice, judged)
    assert found["difference"] == pytest.approx(0.5) and found["n_tasks"] == 6
    assert found["by_seed"] == judged[1] == [1.0, 0.5, 0.0]
    monkeypatch.setenv("COLUMNS", "200")
    _show(found, "echo.yaml", ())
    assert "+100.0, +50.0, +0.0; the interval is of these runs" in capsys.readouterr().out


def test_no_run_of_a_tuning_is_pushed(tmp_path: Path) -> None:
    recipe = str(recipe_parts.write(tmp_path))
    hub = ("push_to_hub={repo: me/small}",)  # which no test can reach: a run that would be pushed to it fails at once
    tuning = Tuning(recipe, hub, load(recipe, list(hub)), tmp_path / "tuned", 1)
    tuning.check([(), ("stages.1.group_size=2",)], 1)
    assert tuning._trained(tmp_path / "tuned" / "run", (), 0, 1, tuning.held_out()) is not None


def test_a_run_whose_evaluation_failed_throughout_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(words: Sequence[str], run: Path) -> bool:
        run.mkdir(parents=True)
        (run / "result.json").write_text('{"after": {"success": null}}')
        return True

    recipe = str(recipe_parts.write(tmp_path))
    tuning = Tuning(recipe, (), load(recipe), tmp_path / "tuned", 1)
    tuning.check([(), ("stages.1.group_size=2",)], 1)
    monkeypatch.setattr("rlhf.commands.tune._ends", ends)
    assert tuning._trained(tmp_path / "tuned" / "run", (), 0, 1, ()) is None
    assert "every attempt of the evaluation" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.extended
def test_choices_are_trained_the_best_goes_on_and_is_judged_with_other_seeds(tmp_path: Path) -> None:
    recipe = recipe_parts.write(tmp_path)
    arguments = ("tune", recipe, "--try", "stages.1.optimizer.lr=1e-2,1e-8", "--seeds", "1", "--reduction-factor", "2")
    found = last_json(run(*arguments, "--out", tmp_path / "tuned", "--json"))
    record = json.loads((tmp_path / "tuned" / "tune.json").read_text())
    assert {name.partition("@")[2] for name in record["success"]} == {"2", "3"}
    again = last_json(run(*arguments, "--out", tmp_path / "tuned", "--json"))
    assert again == found
