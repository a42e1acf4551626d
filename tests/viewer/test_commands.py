"""`rlhf view` and `rlhf top` on the command line."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from rlhf import locks
from rlhf.commands.view import shown_beside
from rlhf.errors import UsageError
from rlhf.progress import RichProgress
from rlhf.terminal import CleanConsole
from rlhf.training.step_line import step_line
from rlhf.viewer import top
from rlhf.viewer.run_folder import RunFolder
from rlhf.viewer.serve import bound
from tests.commands import run as invoke
from tests.evaluation.synthetic import make_run


def test_a_port_in_use_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = bound("127.0.0.1", port)
        place.socket.close()
        assert place.port > port
        assert place.url == f"http://127.0.0.1:{place.port}/{place.key}/"
        assert len(place.key) >= 16


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UsageError, match="the viewer cannot listen at this address"):
        bound("192.0.2.1", 0)


def test_view_serves_without_torch_until_its_parent_closes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "coin", n_steps=2, n_eval=2)
    code = (
        "import sys\nfrom rlhf.cli import app\n"
        "try: app()\nfinally: print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, "view", str(run), "--port", "0", "--json", "--until-closed"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin and process.stdout and process.stderr
        url = json.loads(process.stdout.readline())["url"]
        with urllib.request.urlopen(f"{url}api/runs", timeout=20) as answer:
            assert json.load(answer)["runs"][0]["id"] == "coin"
        with urllib.request.urlopen(f"{url}api/run/coin/trajectory?stage=policy_gradient&phase=train&step=1&row=0"):
            pass
        with urllib.request.urlopen(f"{url}api/run/coin/events", timeout=20) as live:
            assert live.readline() == b"retry: 1000\n"
            process.stdin.close()
            assert process.stdout.read().strip() == "[]"
        assert process.wait(30) == 0
        assert process.stderr.read() == "", "somebody watches while it ends"


def test_a_viewer_beside_training_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def kept(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        began.append(real(*arguments, **(options | {"stdout": subprocess.PIPE})))  # type: ignore[call-overload]
        return began[0]

    monkeypatch.setattr(subprocess, "Popen", kept)
    with shown_beside(make_run(tmp_path / "coin", n_steps=2, n_eval=2)):
        assert began[0].stdout is not None
        url = began[0].stdout.readline().decode().strip()
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert b"rlhf view" in answer.read()
    assert began[0].wait(30) is not None


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for name in ("view", "top"):
        found = invoke(name, str(tmp_path / "nothing"))
        assert found.exit_code == 2
        assert "there is no run" in found.output
    (tmp_path / "evaluation.yaml").write_text("{}")
    for options in ([], ["--json"]):
        found = invoke("top", str(tmp_path), *options)
        assert found.exit_code == 2 and "there is no run" in found.output, "an evaluation trains nothing"
    assert "no pattern" in invoke("view", str(tmp_path), "--redact", "(").output


def test_top_shows_where_a_run_is(tmp_path: Path) -> None:
    run = make_run(tmp_path / "coin", n_steps=8, n_eval=8)
    found = invoke("top", str(run), "--once")
    assert found.exit_code == 0
    for words in ("finished", "8 of 60 steps", "success", "tokens/s", "on unseen tasks, after"):
        assert words in found.output
    told = json.loads(invoke("top", str(run), "--json").output.splitlines()[-1])
    assert told["step"] == 8
    console = Console(width=40, record=True, file=io.StringIO())
    console.print(top.shown(RunFolder(tmp_path)))
    assert "not begun" in console.export_text()


def test_top_prints_once_and_ends_where_there_is_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\nstages: [{kind: policy_gradient, steps: 5}]\n")
    command = [sys.executable, "-m", "rlhf.cli", "top", str(tmp_path)]
    with locks.held(tmp_path, "a test"):
        printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "running" in printed


def test_top_leaves_out_a_kl_that_is_rounding(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\nstages: [{kind: policy_gradient, steps: 5}]\n")
    for kl in (7e-13, 0.002):
        line = {"step": 1, "stage": "0-policy_gradient", "time": 1.0, "loss/total": 0.5, "loss/approx_kl": kl}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        assert ("KL" in invoke("top", str(tmp_path), "--once").output) is (kl > 1e-9)


def test_top_shows_a_run_whose_figures_are_not_finite(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\nstages: [{kind: policy_gradient, steps: 5}]\n")
    line = {"step": 1, "stage": "0-policy_gradient", "time": 1.0, "loss/total": None, "rollout/success": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    found = invoke("top", str(tmp_path), "--once")
    assert found.exit_code == 0 and "50" in found.output and "loss" not in found.output


def test_a_step_in_one_line() -> None:
    values = {
        "rollout/success": 0.5,
        "rollout/success_low": 0.28,
        "rollout/success_high": 0.72,
        "rollout/return_mean": 0.4,
    }
    values |= {"rollout/tokens_per_s": 99.5, "loss/total": 0.0312, "loss/approx_kl": 0.00123, "loss/kl_ref": 0.5}
    assert step_line(values) == "success 50% (28%-72%)  return +0.40  loss 0.0312  KL 0.5  100 tok/s"
    only = {name: value for name, value in values.items() if name != "loss/kl_ref"}
    assert "KL 0.0012" in step_line(only)
    assert "KL" not in step_line({**only, "loss/approx_kl": 1e-14}), "rounding of a step's only update"
    none = {name: x for name, x in values.items() if name not in ("rollout/success", "rollout/return_mean")}
    assert step_line(none) == "loss 0.0312  KL 0.5  100 tok/s", "a step without trajectories"


def test_lines_without_a_terminal_say_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "said").open("w") as file, RichProgress(CleanConsole(file=file, width=200), every=1) as progress:
        clock = [100.0]
        monkeypatch.setattr("rlhf.progress.time.monotonic", lambda: clock[0])
        progress.stage("policy_gradient", 4, 1)
        clock[0] += 30
        progress.advance("success 50%")
    assert (tmp_path / "said").read_text() == "policy_gradient 2/4  success 50%  0:01:00 left\n"


def test_without_a_terminal_a_slow_step_has_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "said").open("w") as file, RichProgress(CleanConsole(file=file, width=200)) as progress:
        clock = [progress._said_at]
        monkeypatch.setattr("rlhf.progress.time.monotonic", lambda: clock[0])
        progress.stage("policy_gradient", 9, 0)
        for seconds in (1, 60, 1):
            clock[0] += seconds
            progress.advance("success 50%")
    assert (tmp_path / "said").read_text().startswith("policy_gradient 2/9")
    assert (tmp_path / "said").read_text().count("\n") == 1
