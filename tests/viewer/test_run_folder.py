"""The log of a run is read as it grows, whatever happens to it."""

from __future__ import annotations

import io
import json
import shutil
import time
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from rlhf import locks
from rlhf.evaluation.contrib.findings import Finding
from rlhf.sinks import JsonlSink, LogLine
from rlhf.viewer import top
from rlhf.viewer.run_folder import RunFolder, RunLog
from rlhf.viewer.run_views import curves, head
from tests.evaluation.synthetic import make_run


def line(step: int, **values: float) -> bytes:
    return json.dumps({"step": step, "stage": "0-policy_gradient", "time": 100.0 + step, **values}).encode() + b"\n"


def test_only_what_was_appended_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = RunLog(path)
    assert log.poll() == 0
    path.write_bytes(line(1) + line(2))
    assert log.poll() == 2
    with path.open("ab") as file:
        file.write(line(3))
    path_before = path.read_bytes()
    assert (log.poll(), log.poll(), log._at) == (1, 0, len(path_before))
    assert [one.step for one in log.lines] == [1, 2, 3]


def test_a_torn_last_line_is_waited_for(tmp_path: Path) -> None:
    path, log = tmp_path / "metrics.jsonl", RunLog(tmp_path / "metrics.jsonl")
    whole = line(1, loss=2.0)
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:cut])
        log = RunLog(path)
        assert log.poll() == 0
        with path.open("ab") as file:
            file.write(whole[cut:])
        assert log.poll() == 1
        assert log.lines[0].values == {"loss": 2.0}


def test_a_log_that_became_shorter_or_another_is_read_anew(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        sink.write(LogLine(step, "0-policy_gradient", 1.0, {"rollout/success": step / 10}))
    log = RunLog(tmp_path / "metrics.jsonl")
    log.poll()
    sink.rewind("0-policy_gradient", 2)  # what a resumed run does: another file in its place
    assert (log.poll(), log.epoch, [one.step for one in log.lines]) == (2, 1, [1, 2])
    sink.close()
    (tmp_path / "metrics.jsonl").write_bytes(line(9))
    assert (log.poll(), log.epoch, [one.step for one in log.lines]) == (1, 2, [9])


def test_lines_that_are_none_are_left_out_and_counted(tmp_path: Path) -> None:
    bad = [b"{}\n", b"[1]\n", b"nonsense\n", b'{"step": "x", "stage": 1, "time": 2}\n', b"\xff\xfe\n", b"\n"]
    (tmp_path / "metrics.jsonl").write_bytes(line(1) + b"".join(bad) + line(2, nan=float("nan")))
    run = RunFolder(tmp_path)
    data = run.poll()
    assert [one.step for one in data.lines] == [1, 2]
    assert data.lines[1].values == {"nan": None}
    assert run.problems == {"metrics.jsonl": "6 lines are no log lines, and left out"}


def test_damaged_files_are_said_and_what_they_were_stays(tmp_path: Path) -> None:
    run = RunFolder(make_run(tmp_path / "run", n_steps=4, n_eval=4))
    known = run.poll().settings
    assert known
    (run.folder / "recipe.yaml").write_text("a: [")
    (run.folder / "result.json").write_text("[1, 2]")
    data = run.poll()
    assert data.settings == known
    assert set(run.problems) == {"recipe.yaml", "result.json"}
    assert head(run, data)["problems"][0]["says"]


def test_a_result_that_was_removed_is_forgotten(tmp_path: Path) -> None:
    run = RunFolder(make_run(tmp_path / "run", n_steps=4, n_eval=4))
    assert run.poll().results
    (run.folder / "result.json").rename(run.folder / "earlier.json")  # as by a run that is extended
    assert not run.poll().results and not run.problems
    (run.folder / "earlier.json").rename(run.folder / "result.json")
    assert run.poll().results


def test_a_run_that_vanishes_says_so(tmp_path: Path) -> None:
    run = RunFolder(make_run(tmp_path / "run", n_steps=4, n_eval=4))
    n = len(run.poll().lines)
    shutil.rmtree(run.folder)
    run._state = (-9.0, "finished")
    assert (run.state(), len(run.poll().lines)) == ("gone", n)


def test_the_state_is_that_of_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(line(1))
    with locks.held(folder, "a test"):
        assert RunFolder(folder).state() == "running"
        shutil.copy(folder / ".lock", tmp_path / "kept")
    assert RunFolder(folder).state() == "stopped"
    owner = json.loads((tmp_path / "kept").read_text()) | {"started": 1}  # its process is gone
    (folder / ".lock").write_text(json.dumps(owner))
    assert RunFolder(folder).state() == "stopped"
    (folder / ".lock").write_text(json.dumps(owner | {"host": "elsewhere", "boot": "other"}))
    assert RunFolder(folder).state() == "running"  # of another machine, and not silent for long
    (folder / "result.json").write_text("{}")
    (folder / ".lock").unlink()
    before = set(folder.iterdir())
    assert RunFolder(folder).state() == "finished"
    assert set(folder.iterdir()) == before


def test_head_says_where_a_run_is_and_how_long_it_takes(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\nstages: [{kind: policy_gradient, steps: 10}]\n")
    values = {"rollout/success": 0.5, "time/rollout_s": 7.0, "time/train_s": 2.0}
    values |= {"rollout/success_low": 0.1, "rollout/success_high": 0.9}
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(line(step, **values) for step in (1, 2, 3, 4)))
    run = RunFolder(tmp_path)
    with locks.held(tmp_path, "a test"):
        told = head(run, run.poll())
    assert (told["step"], told["n_steps"], told["pace_s"], told["left_s"]) == (4, 10, 1.0, 6.0)
    assert told["waits_for"] == "step 5, mostly rollouts"
    assert told["success"] == {"value": 0.5, "low": 0.1, "high": 0.9, "step": 4}
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(line(5, **{"rollout/success": 0.25, "rollout/n_episodes": 20.0}))  # as older logs have it
    assert head(run, run.poll())["success"] == {"value": 0.25, "low": None, "high": None, "step": 5}


def test_curves_are_thinned_when_there_are_very_many_lines(tmp_path: Path) -> None:
    n = 28_000
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(line(i, loss=float(i)) for i in range(n)))
    run = RunFolder(tmp_path)
    begun = time.process_time()
    data = run.poll()
    assert time.process_time() - begun < 60
    found = curves(data, ["loss", "absent"])
    assert (found["n_lines"], found["thinned"], list(found["values"])) == (n, 7, ["loss"])
    assert found["step"][-200:] == list(range(n - 200, n))
    before = found["step"][:-200]
    assert len(before) == pytest.approx((n - 200) / 7, abs=3)
    assert max(b - a for a, b in pairwise(before)) <= 13, "evenly"
    assert curves(data, [], since=n - 1)["step"] == [n - 1]


@pytest.mark.parametrize("period", [2, 3, 4, 6, 10, 12, 100])
def test_thinned_curves_keep_whole_steps_and_every_metric(tmp_path: Path, period: int) -> None:
    n, logged = 12_000, list[bytes]()
    for step in range(1, n + 1):
        logged.append(line(step, **{"time/rollout_s": 0.6}))
        if step % period == 0:
            logged.append(line(step, **{"eval/success": 0.5}))
        if step == 4321:
            logged.append(line(step, **{"custom/once": 1.0}))
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(logged))
    found = curves(RunFolder(tmp_path).poll(), [])
    assert found["thinned"] > 2 and len(found["step"]) < 5000
    columns = {name: [s for s, v in zip(found["step"], x, strict=True) if v] for name, x in found["values"].items()}
    assert columns["custom/once"] == [4321]
    # Some of every metric all along, and with the evaluation of a step (but a rare one) the step itself.
    evaluations, steps = columns["eval/success"], set(columns["time/rollout_s"])
    share = 1 if n / period <= 200 else found["thinned"]
    assert len(evaluations) == pytest.approx(n / period / share, rel=0.2)
    assert period == 100 or steps.issuperset(evaluations)
    assert columns["time/rollout_s"][-40:] == list(range(n - 39, n + 1)), "what the timeline draws has no gap"


@pytest.mark.parametrize("during", ["a step", "an evaluation"])
def test_the_time_left_counts_evaluations_and_no_pause(tmp_path: Path, during: str) -> None:
    (tmp_path / "recipe.yaml").write_text("stages: [{kind: policy_gradient, steps: 30}, {kind: supervised}]\n")
    logged, now = list[bytes](), 0.0
    for step in range(1, 21):
        night = 8 * 3600 * (step == (16 if during == "a step" else 15))  # stopped
        now += 30 + night * (during == "a step")
        logged.append(json.dumps({"step": step, "stage": "0-policy_gradient", "time": now}).encode() + b"\n")
        if step % 5 == 0:
            now += 100 + night
            values = {"step": step, "stage": "0-policy_gradient", "time": now, "eval/success": 0.5, "time/eval_s": 99}
            logged.append(json.dumps(values).encode() + b"\n")
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(logged))
    run = RunFolder(tmp_path)
    with locks.held(tmp_path, "a test"):
        told = head(run, run.poll())
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(top.shown(run))
    assert told["pace_s"] == pytest.approx(50, abs=3) and told["left_s"] == told["pace_s"] * 10
    assert not told["is_last_stage"] and "left of this stage" in console.export_text()


def test_a_check_that_cannot_be_made_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"rollout/n_generations": 8.0, "rollout/n_truncated_generations": 8.0, "collapse/echo_trap": 1.0}
    values |= {"loss/sampler_logprob_diff_mean": 1e-6}
    unscored = {"monitor/quality": float("nan"), "monitor_failures/quality": 8.0}
    (tmp_path / "metrics.jsonl").write_bytes(line(1, **values, **unscored))
    run = RunFolder(tmp_path)
    names = ["Trainer and engine", "Cut generations", "Echo trap", "Values that are not finite"]
    assert [one.name for one in run.findings(run.poll())] == names and not run.problems
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(line(2, **{"monitor/quality": 0.5}))  # without its gap to the score
    monkeypatch.setattr("rlhf.viewer.run_folder._FINDINGS_S", 0.0)
    assert [one.name for one in run.findings(run.poll())] == names
    assert run.problems["findings"].startswith("the check monitored could not be made")
    (tmp_path / "metrics.jsonl").write_bytes(line(3, **{"collapse/echo_trap": 1.0, "rollout/n_generations": 8.0}))
    assert [one.name for one in run.findings(run.poll())] == ["Echo trap", "Cut generations"], "the worst first"
    assert not run.problems


def test_top_shows_every_problem_and_cuts_what_is_worth_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(line(1))
    run, levels = RunFolder(tmp_path), ["problem"] * 4 + ["look"] * 5
    found = [Finding(f"finding {i}", "1", level, "", "") for i, level in enumerate(levels)]  # type: ignore[arg-type]
    for n_problems, n_shown in ((4, 4), (0, 3)):
        monkeypatch.setattr(run, "findings", lambda data, first=4 - n_problems: found[first:])
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(top.shown(run))
        assert console.export_text().count("finding ") == n_shown


def test_how_long_imitation_takes_follows_from_its_demonstrations(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("stages: [{kind: supervised, epochs: 2, batch_size: 8}]\n")
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    began = time.time() - 10
    for step in (1, 2, 3):
        values = {"supervised/n_demonstrations": 99.0, "supervised/loss": 2.5, "train/tokens_per_s": 700.0}
        sink.write(LogLine(step, "0-supervised", began + 2 * step, values))
    sink.close()
    run = RunFolder(tmp_path)
    with locks.held(tmp_path, "a test"):
        told = head(run, run.poll())
    assert (told["step"], told["n_steps"], told["loss"], told["trained_per_s"]) == (3, 26, 2.5, 700.0)
    assert told["left_s"] == pytest.approx(2 * 23)
