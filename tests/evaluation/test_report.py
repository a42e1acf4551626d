"""The report page: whole, self-contained, safe, and honest about what went wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from rlhf.data import Action, Failure, Finish, Generation, Outcome, Prompt, Trajectory, Turn
from rlhf.errors import CheckpointError, DataError
from rlhf.evaluation.contrib.findings import Finding, findings
from rlhf.evaluation.report import write_report
from rlhf.evaluation.run_data import RunData
from rlhf.evaluation.store import FailureRecord, TrajectoryRecord, TrajectoryWriter
from rlhf.sinks import JsonlSink, Metrics
from tests.evaluation.pages import Page
from tests.evaluation.synthetic import make_run

EVIL = '</span></pre><script>alert("x")</script><img src=x onerror=alert(1)> ${x} $style \x1b[31m'


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "quickstart", n_steps=20, n_eval=60)


@pytest.fixture(scope="module")
def page(run_folder: Path) -> Page:
    path = write_report(run_folder)
    assert path == run_folder / "report.html"
    return Page(path.read_text("utf-8"))


def test_the_headline_is_success_before_and_after_with_intervals(run_folder: Path, page: Page) -> None:
    result = json.loads((run_folder / "result.json").read_text())
    for name in ("before", "after"):
        point = result[name]
        shown = [f"{100 * point[key]:.1f}".removesuffix(".0") + "%" for key in ("success", "low", "high")]
        charts = [a["aria-label"] or "" for tag, a in page.elements if tag == "svg"]
        assert f"{name}: {shown[0]}, interval {shown[1]} to {shown[2]}" in charts[0]
        assert shown[0] in page.words
    assert "success on 60 unseen tasks (test split)" in page.words
    assert "On the same 60 tasks:" in page.words and "McNemar's test, mid-p" in page.words


def test_the_gap_of_trainer_and_engine_is_the_first_thing_below(page: Page) -> None:
    start = page.words.index("Can it be trusted?", page.words.index("Facts of the run"))
    assert page.words[start:].startswith("Can it be trusted? Trainer and engine fine")


def test_every_curve_is_drawn_and_described(page: Page) -> None:
    labels = [attrs.get("aria-label") or "" for tag, attrs in page.elements if tag == "svg"]
    titles = ("Success", "Return", "Difference of trainer", "Entropy", "Invalid actions", "Speed", "Imitation")
    for title in titles:
        assert sum(label.startswith(title) for label in labels) >= 1, title
    assert all(re.search(r"\d", label) for label in labels)


def test_nothing_is_fetched(page: Page) -> None:
    for tag, attrs in page.elements:
        assert tag not in ("img", "link", "iframe", "object", "base")
        for name in ("src", "href", "action", "data"):
            assert not (attrs.get(name) or "#").lstrip().startswith(("http", "//", "file", "javascript"))
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and a.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy


def test_a_screen_reader_finds_its_way(page: Page) -> None:
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    links = {(a["href"] or "")[1:] for tag, a in page.elements if tag == "a"}
    labelled = {a["aria-labelledby"] for _, a in page.elements if "aria-labelledby" in a}
    assert links | labelled <= set(ids) and len(links) == 4
    boxes = [a for _, a in page.elements if a.get("class") == "tokens"]
    assert len(boxes) == 6 and all(a.get("tabindex") == "0" and a.get("aria-label") for a in boxes)


def test_tokens_carry_colour_log_prob_and_advantage(page: Page) -> None:
    tokens = [a for tag, a in page.elements if tag == "span" and re.fullmatch(r"t( up| down)?", a.get("class") or "")]
    assert len(tokens) > 100
    assert {a["class"] for a in tokens} >= {"t up", "t down"}
    assert all("log-prob" in (a["title"] or "") for a in tokens)
    assert all("advantage" in (a["title"] or "") for a in tokens if a["class"] != "t")


def test_facts_of_the_run_are_there(page: Page) -> None:
    for fact in ("textworld-express", "1.1.0", "2.13.0", "kind: policy_gradient", "making trajectories and scoring"):
        assert fact in page.words
    assert "the game's process died" in page.words


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
    assert page.count("script") == 1 and page.count("img") == 0
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert page.words.count("onerror=alert(1)") >= 8


def test_a_run_stopped_early_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: early\n")
    assert "no evaluation yet" in Page(write_report(tmp_path).read_text("utf-8")).words
    sink = Metrics([JsonlSink(tmp_path / "metrics.jsonl")])
    sink.log(1, "0-policy_gradient", {"rollout/success": 0.25, "loss/policy": float("nan")})
    sink.close()
    words = Page(write_report(tmp_path).read_text("utf-8")).words
    assert "Values that are not finite" in words and "loss/policy" in words
    assert "No trajectories are stored" in words


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


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    (tmp_path / "report.html.tmp").mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_report(tmp_path)


def run_with(tmp_path: Path, results: dict[str, object] | None = None, **values: float) -> dict[str, Finding]:
    """Findings of a run that logged `values` in one step; names are written with `__` for `/`."""
    (tmp_path / "recipe.yaml").write_text("limits: {max_tokens: 24, max_turns: 8}\n")
    (tmp_path / "result.json").write_text(json.dumps(results or {}))
    sink = Metrics([JsonlSink(tmp_path / "metrics.jsonl")])
    sink.log(1, "train", {name.replace("__", "/"): value for name, value in values.items()})
    sink.close()
    return {finding.name: finding for finding in findings(RunData.read(tmp_path))}


@pytest.mark.parametrize(("gap", "level"), [(1e-6, "fine"), (0.05, "look"), (0.5, "problem")])
def test_a_gap_between_trainer_and_engine_is_judged(tmp_path: Path, gap: float, level: str) -> None:
    assert run_with(tmp_path, loss__sampler_gap_mean=gap)["Trainer and engine"].level == level


@pytest.mark.parametrize(("share", "level"), [(0.97, None), (0.6, "look"), (0.2, "problem")])
def test_few_effective_samples_are_pointed_out(tmp_path: Path, share: float, level: str | None) -> None:
    found = run_with(tmp_path, loss__sampler_ess=share, loss__sampler_rejected_share=0.25).get("Effective sample size")
    assert (found and found.level) == level
    assert found is None or ("25% of the tokens" in found.words and "`correction`" in found.hint)


def test_truncation_names_the_key_that_sets_it(tmp_path: Path) -> None:
    found = run_with(tmp_path, rollout__n_truncated_generations=30, rollout__n_episodes=10, rollout__n_turns_mean=10)[
        "Cut generations"
    ]
    assert (found.value, found.level) == ("30%", "problem")  # 30 of 10 episodes x 10 turns
    assert found.hint == "raise limits.max_tokens (now 24)"


def test_failed_parts_are_counted_in_training_and_evaluation(tmp_path: Path) -> None:
    point = {"success": 0.5, "low": 0.4, "high": 0.6, "n": 100, "n_errors": 3}
    found = run_with(tmp_path, {"after": point}, rollout__n_failures=2, rollout__n_episodes=100)["Failed parts"]
    assert (found.value, found.level) == ("2%", "look")
    assert "2 attempts in training and 3 in evaluation" in found.words


def test_groups_without_signal_invalid_actions_and_limits_are_shown(tmp_path: Path) -> None:
    found = run_with(
        tmp_path,
        credit__n_groups=10,
        credit__n_zero_std_groups=6,
        credit__n_single_groups=2,
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
    assert found["Skipped updates"].value == "1" and found["No updates"].level == "problem"


@pytest.mark.parametrize(("flat", "level"), [(2, "fine"), (5.1, "look"), (9.5, "problem")])
def test_half_of_the_groups_without_signal_is_worth_a_look(tmp_path: Path, flat: float, level: str) -> None:
    found = run_with(tmp_path, {}, credit__n_groups=10, credit__n_zero_std_groups=flat)["Groups without signal"]
    assert found.level == level and bool(found.hint) == (level != "fine")


def test_overlapping_intervals_are_pointed_out(tmp_path: Path) -> None:
    before, after = ({"success": x, "low": x - 0.1, "high": x + 0.1, "n": 90} for x in (0.4, 0.55))
    assert run_with(tmp_path, {"before": before, "after": after})["Intervals overlap"].level == "look"
    after["low"] = 0.51
    assert "Intervals overlap" not in run_with(tmp_path, {"before": before, "after": after})


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_a_real_browser_runs_the_page(run_folder: Path, page: Page, tmp_path: Path) -> None:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    result = subprocess.run(
        ["chromium", *flags, f"--user-data-dir={tmp_path}", f"file://{run_folder / 'report.html'}"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    # The script ran under the page's own policy: it fills the line below each trajectory.
    assert len(re.findall(r"\d+ sampled tokens\. Point at one", result.stdout)) == 6


def test_an_echo_trap_is_a_problem_and_its_absence_is_not_spoken_of(tmp_path: Path) -> None:
    found = run_with(tmp_path, collapse__echo_trap=1)["Echo trap"]
    assert (found.value, found.level) == ("1 of 1 steps", "problem")
    (tmp_path / "other").mkdir()
    assert "Echo trap" not in run_with(tmp_path / "other", collapse__echo_trap=0)
