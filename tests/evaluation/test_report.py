"""The report page: whole, self-contained, safe, and honest about what went wrong."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

import pytest

from rlhf.data import Action, Failure, Finish, Generation, Outcome, Prompt, Trajectory, Turn
from rlhf.errors import CheckpointError, DataError
from rlhf.evaluation.contrib.findings import Finding, findings
from rlhf.evaluation.rows import FailureRecord, TrajectoryRecord
from rlhf.evaluation.run_data import RunData
from rlhf.evaluation.store import StoredStep, TrajectoryWriter, list_steps, read_trajectories
from rlhf.sinks import JsonlSink, Metrics
from rlhf.viewer.answers import Answers
from rlhf.viewer.library import Library
from rlhf.viewer.redaction import Redaction
from rlhf.viewer.report import by_interest, frozen, write_report
from rlhf.viewer.run_folder import RunFolder
from tests.evaluation.pages import Page
from tests.evaluation.synthetic import make_run

EVIL = '</span></pre></script><script>alert("x")</script><img src=x onerror=alert(1)> ${x} $style \x1b[31m'


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "quickstart", n_steps=6, n_eval=60)


@pytest.fixture(scope="module")
def page(run_folder: Path) -> Page:
    path = write_report(run_folder)
    assert path == run_folder / "report.html"
    return Page(path.read_text("utf-8"))


def test_the_headline_is_success_before_and_after_with_intervals(run_folder: Path, page: Page) -> None:
    result = json.loads((run_folder / "result.json").read_text())
    head = page.answers["run/quickstart"]
    for name, told in zip(("before", "after"), head["evaluations"], strict=True):
        point = result[name]
        assert {key: told[key] for key in ("success", "low", "high")} == {
            key: point[key] for key in told if key in ("success", "low", "high")
        }
        shown = [f"{100 * point[key]:.1f}".removesuffix(".0") + "%" for key in ("success", "low", "high")]
        assert f"{name}: success {shown[0]}, 95% interval {shown[1]} to {shown[2]}" in page.words
    assert head["learned"]["n"] == 60 and head["learned"]["test"] in ("mcnemar", "permutation")


def test_the_gap_of_trainer_and_engine_is_the_first_thing_below(page: Page) -> None:
    first, *others = page.answers["run/quickstart"]["cautions"]
    assert (first["name"], first["level"]) == ("Trainer and engine", "fine")
    levels = [one["level"] for one in others]
    assert levels == sorted(levels, key=("problem", "look", "fine").index)


def test_every_curve_is_in_it(run_folder: Path, page: Page) -> None:
    curves = page.answers["run/quickstart/metrics"]
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line} - {"step", "stage", "time"}
    assert set(curves["values"]) == names and len(curves["step"]) == len(lines)
    assert curves["values"]["loss/entropy"][-2] == pytest.approx(lines[-2]["loss/entropy"], rel=1e-5)


def test_nothing_is_fetched(page: Page) -> None:
    assert page.fetches_nothing()
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and a.get("http-equiv")) or ""
    assert policy.count("sha256-") == 3 and "unsafe" not in policy and "connect-src" not in policy


def test_tokens_carry_colour_log_prob_and_advantage(run_folder: Path, page: Page) -> None:
    stored = list(read_trajectories(run_folder / "trajectories", stage="policy_gradient", steps=[3]))
    held = page.attempts["quickstart/policy_gradient:train:3"]["attempts"]
    for record, shown in zip(stored, (one for one in held if not one["is_failure"]), strict=True):
        tokens = [g["tokens"] for turn in shown["turns"] for g in turn["generations"]]
        for kept, g, row in zip(tokens, record.trajectory.generations, record.advantages or (), strict=True):
            assert kept["id"] == list(g.token_ids) and len(kept["piece"]) == g.n_tokens
            assert kept["logprob"] == pytest.approx(list(g.logprobs), rel=1e-4)
            assert kept["advantage"] == pytest.approx(list(row), rel=1e-4)
            assert kept["version"] == [g.policy_version] * g.n_tokens


def test_all_attempts_are_in_it_up_to_a_size(run_folder: Path, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {f"quickstart/{s.stage}:{s.phase}:{s.step}" for s in list_steps(run_folder / "trajectories")}
    assert set(page.attempts) == stored and "All attempts are in it." in page.words
    monkeypatch.setattr("rlhf.viewer.report.LIMIT", 20_000)
    short = Page(write_report(run_folder).read_text("utf-8"))
    assert "quickstart/after:eval:6" in short.attempts and len(short.attempts) < len(stored)
    assert f"It holds the attempts of {len(short.attempts)} of 8 steps" in short.words
    [kept] = [one["steps"] for one in short.answers["run/quickstart/steps"]["stored"] if one["stage"] == "after"]
    assert kept == [6]


def test_a_step_that_does_not_fit_holds_its_groups_and_its_first_attempts(tmp_path: Path) -> None:
    answers = Answers(Library([make_run(tmp_path / "quickstart", n_steps=1, n_eval=250)]), Redaction())

    def packed(limit: int) -> tuple[dict[str, bytes], str]:
        found, kept = frozen(answers, limit)
        return {place: base64.b64decode(x) for place, x in found["files"]["quickstart"].items()}, kept

    (whole, _), (found, kept) = packed(10**9), packed(10_000)
    assert 10_000 < sum(map(len, found.values())) < 30_000 < min(len(whole[place]) for place in found)
    n_out = 0
    for place, one in found.items():
        held, all_of_it = json.loads(gzip.decompress(one)), json.loads(gzip.decompress(whole[place]))
        n = len(held["attempts"])
        n_out += held["n_attempts"] - n
        assert held["groups"] == all_of_it["groups"] and len(all_of_it["attempts"]) == held["n_attempts"]
        assert held["attempts"] == all_of_it["attempts"][:n]
    words = f"It holds the attempts of {len(found)} of 3 steps and evaluations, without {n_out} of these attempts"
    assert n_out > 0 and kept.startswith(words)


@pytest.mark.parametrize(("n", "order"), [(1, [0]), (2, [1, 0]), (9, [8, 0, 4, 6, 2, 7, 5, 3, 1])])
def test_the_ends_of_a_run_have_room_first(n: int, order: list[int]) -> None:
    files = [StoredStep("s", i, "train", Path(str(i))) for i in range(n)]
    assert [stored.step for stored in by_interest(files)] == order
    evaluations = [StoredStep(name, i, "eval", Path(name)) for i, name in enumerate(("before", "watch", "after"))]
    assert [s.stage for s in by_interest([*evaluations, *files])][:2] == ["after", "before"]


def test_facts_of_the_run_are_there(page: Page) -> None:
    facts = page.answers["run/quickstart/facts"]
    assert ["packages.textworld-express", "1.1.0"] in facts["versions"] and "kind: policy_gradient" in facts["recipe"]
    assert any(name.startswith("generating and scoring trajectories") for name, _ in facts["times"])
    assert {"the game's process died"} >= {one["message"] for one in facts["failures"]}
    assert {name for name, _, _ in facts["metrics"]} >= {"rollout/success", "loss/entropy"}


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    generation = Generation(Prompt((1,)), (2,), (-1.0,), Finish.STOP, 0)
    turn = Turn(Action(EVIL, (generation,), error=EVIL), EVIL, valid=False)
    t = Trajectory(EVIL, 0, EVIL, (turn,), Outcome.FAILED, detail=EVIL)
    failure = FailureRecord(1, "s", "train", EVIL, Failure(0, Outcome.ENV_ERROR, EVIL))
    record = TrajectoryRecord(1, "s", "train", EVIL, t, None, ((1.0,),))
    TrajectoryWriter(tmp_path / "trajectories").write("s", 1, "train", [record, failure])
    (tmp_path / "recipe.yaml").write_text(f"name: {json.dumps(EVIL)}\n")
    (tmp_path / "versions.json").write_text(json.dumps({EVIL: {EVIL: EVIL}}))
    point = {"success": 0.5, "low": 0.4, "high": 0.6, "n": EVIL, "n_errors": 0, "split": EVIL}
    (tmp_path / "result.json").write_text(json.dumps({EVIL: point}))
    sink = Metrics([JsonlSink(tmp_path / "metrics.jsonl")])
    sink.log(1, EVIL, {"rollout/success": 0.5, f"reward/{EVIL}": 1.0, "eval/success": 0.5})
    sink.log(1, "other", {"rollout/success": 0.5, "eval/success": 0.5})
    sink.close()
    page = Page(write_report(tmp_path).read_text("utf-8"))
    assert page.count("script") == 3 and page.count("img") == 0 and page.fetches_nothing()
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert page.words.count("onerror=alert(1)") >= 2
    [held] = page.attempts.values()
    assert held["attempts"][0]["opening"] == EVIL and held["attempts"][1]["detail"] == EVIL


def test_a_planted_key_is_in_no_report(tmp_path: Path) -> None:
    key = "sk-proj-Abcdefghij0123456789"
    t = Trajectory("t", 0, f"the key is {key}", (Turn(Action("order 66"), "done"),), Outcome.SOLVED)
    TrajectoryWriter(tmp_path / "trajectories").write("s", 1, "train", [TrajectoryRecord(1, "s", "train", "t", t)])
    (tmp_path / "recipe.yaml").write_text(f"name: {key}\n")
    for redaction, hidden in ((None, [key]), (Redaction(["order [0-9]+"]), [key, "order 66"])):
        page = Page(write_report(tmp_path, redaction).read_text("utf-8"))
        text = json.dumps([page.attempts, page.answers, page.words])
        assert all(one not in text for one in hidden) and ("order 66" in text) is (redaction is None)


def test_a_run_stopped_early_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: early\n")
    assert "no evaluation yet" in Page(write_report(tmp_path).read_text("utf-8")).words
    sink = Metrics([JsonlSink(tmp_path / "metrics.jsonl")])
    sink.log(1, "0-policy_gradient", {"rollout/success": 0.25, "loss/policy": float("nan")})
    sink.close()
    page = Page(write_report(tmp_path).read_text("utf-8"))
    head = page.answers[f"run/{tmp_path.name}"]
    [finding] = [one for one in head["cautions"] if one["name"] == "Values that are not finite"]
    assert "loss/policy" in finding["words"] and head["state"] == "stopped"
    assert page.attempts == {} and page.answers[f"run/{tmp_path.name}/steps"] == {"stored": []}


def test_no_run_and_damaged_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run in this folder"):
        write_report(tmp_path)
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(DataError, match=r"result\.json"):
        write_report(tmp_path)
    (tmp_path / "result.json").write_text("[1]")
    with pytest.raises(DataError, match="no mapping"):
        write_report(tmp_path)
    (tmp_path / "result.json").unlink()
    (tmp_path / "recipe.yaml").write_text("a: [")
    with pytest.raises(DataError, match=r"recipe\.yaml"):
        write_report(tmp_path)


def test_an_evaluation_in_which_nothing_counted_is_no_point_with_an_interval(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"after": {"success": NaN, "low": NaN, "high": NaN, "n": 0}, "x": 1}')
    read, polled = RunData.read(tmp_path), RunFolder(tmp_path).poll()
    assert read.results == polled.results == {} and read.facts == polled.facts
    assert read.facts["after"]["success"] is None and write_report(tmp_path).is_file()


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    (tmp_path / "report.html" / "in the way").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_report(tmp_path)


def test_one_unreadable_step_does_not_cost_the_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "coin", n_steps=2, n_eval=4)
    (run / "trajectories" / "policy_gradient-train-000001.parquet").write_bytes(b"PAR1 half")
    page = Page(write_report(run).read_text("utf-8"))
    assert "not a readable trajectory file" in page.attempts["coin/policy_gradient:train:1"]["problem"]
    assert page.attempts["coin/policy_gradient:train:2"]["attempts"]


def run_with(
    tmp_path: Path, results: dict[str, object] | None = None, n_steps: int = 1, **values: float
) -> dict[str, Finding]:
    """Findings of a run that logged `values` in each step; names are written with `__` for `/`."""
    (tmp_path / "recipe.yaml").write_text("limits: {max_tokens: 24, max_turns: 8}\n")
    (tmp_path / "result.json").write_text(json.dumps(results or {}))
    sink = Metrics([JsonlSink(tmp_path / "metrics.jsonl")])
    for step in range(1, n_steps + 1):
        sink.log(step, "train", {name.replace("__", "/"): value for name, value in values.items()})
    sink.close()
    return {finding.name: finding for finding in findings(RunData.read(tmp_path), pytest.fail)}


@pytest.mark.parametrize(("gap", "level"), [(1e-6, "fine"), (0.05, "look"), (0.5, "problem")])
def test_a_gap_between_trainer_and_engine_is_judged(tmp_path: Path, gap: float, level: str) -> None:
    assert run_with(tmp_path, loss__sampler_logprob_diff_mean=gap)["Trainer and engine"].level == level


@pytest.mark.parametrize(("share", "level"), [(0.97, None), (0.6, "look"), (0.2, "problem")])
def test_few_effective_samples_are_pointed_out(tmp_path: Path, share: float, level: str | None) -> None:
    found = run_with(tmp_path, loss__sampler_ess=share, loss__sampler_rejected_share=0.25).get("Effective sample size")
    assert (found and found.level) == level
    assert found is None or ("25% of the tokens" in found.words and "`correction`" in found.hint)


def test_truncation_names_the_key_that_sets_it(tmp_path: Path) -> None:
    found = run_with(tmp_path, rollout__n_truncated_generations=30, rollout__n_generations=100)["Cut generations"]
    assert (found.value, found.level) == ("30%", "problem")
    assert found.hint == "raise limits.max_tokens (now 24)"


def test_failed_parts_are_counted_in_training_and_evaluation(tmp_path: Path) -> None:
    point = {"success": 0.5, "low": 0.4, "high": 0.6, "n": 100, "n_errors": 3}
    found = run_with(tmp_path, {"after": point}, rollout__n_infra_errors=2, rollout__n_episodes=100)["Failed parts"]
    assert (found.value, found.level) == ("2%", "look")
    assert "2 attempts in training and 3 in evaluation" in found.words


def test_groups_without_signal_invalid_actions_and_limits_are_shown(tmp_path: Path) -> None:
    found = run_with(
        tmp_path,
        n_steps=3,
        credit__n_groups=10,
        credit__n_zero_std_groups=6,
        credit__n_singleton_groups=2,
        rollout__invalid_share=0.6,
        rollout__n_episodes=40,
        rollout__n_turn_limit=30,
        optimizer__n_skipped=1,
        optimizer__n_updates=0,
    )
    assert (found["Groups without signal"].value, found["Groups without signal"].level) == ("80%", "look")
    assert found["Invalid actions"].level == "problem"
    assert found["Episodes cut by the turn limit"].value == "75%"
    assert "limits.max_turns (8)" in found["Episodes cut by the turn limit"].hint
    assert found["Skipped updates"].value == "3" and found["No updates"].level == "problem"


@pytest.mark.parametrize(("flat", "level"), [(2, "fine"), (5.1, "look"), (9.5, "problem")])
def test_half_of_the_groups_without_signal_is_worth_a_look(tmp_path: Path, flat: float, level: str) -> None:
    found = run_with(tmp_path, {}, credit__n_groups=10, credit__n_zero_std_groups=flat)["Groups without signal"]
    assert found.level == level and bool(found.hint) == (level != "fine")


def test_overlapping_intervals_are_pointed_out(tmp_path: Path) -> None:
    before, after = ({"success": x, "low": x - 0.1, "high": x + 0.1, "n": 90} for x in (0.4, 0.55))
    assert run_with(tmp_path, {"before": before, "after": after})["Intervals overlap"].level == "look"
    after["low"] = 0.51
    assert "Intervals overlap" not in run_with(tmp_path, {"before": before, "after": after})


def test_an_echo_trap_is_a_problem_and_its_absence_is_not_spoken_of(tmp_path: Path) -> None:
    found = run_with(tmp_path, collapse__echo_trap=1)["Echo trap"]
    assert (found.value, found.level) == ("1 of 1 steps", "problem")
    (tmp_path / "other").mkdir()
    assert "Echo trap" not in run_with(tmp_path / "other", collapse__echo_trap=0)
