"""Metric names, and the sinks that keep what was logged."""

from __future__ import annotations

import ast
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlhf
from rlhf.errors import CheckpointError, DataError
from rlhf.evaluation.run_data import RunData
from rlhf.metrics import METRICS, RENAMED_METRICS, describe, present_name
from rlhf.sinks import JsonlSink, Metrics, TensorboardSink, read_metrics
from rlhf.viewer.run_folder import RunFolder


def logged(path: Path) -> list[tuple[str, int]]:
    return [(line.stage, line.step) for line in read_metrics(path)]


def test_each_metric_has_a_unit_and_a_meaning() -> None:
    assert len(METRICS) > 60
    for name, metric in METRICS.items():
        assert metric.name == name and metric.unit and metric.meaning
        assert name.count("/") == 1
    assert METRICS["rollout/success"].unit == "share"
    assert METRICS["loss/sampler_logprob_diff_mean"].unit == "nats"


def test_an_unknown_name_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean 'rollout/success'"):
        Metrics().log(0, "train", {"rollout/sucess": 1.0})


def test_every_name_written_in_the_code_is_described() -> None:
    prefixes = "|".join({name.split("/")[0] for name in METRICS})
    for path in Path(rlhf.__file__).parent.rglob("*.py"):
        for name in re.findall(rf'"((?:{prefixes})/[a-z0-9_]+)"', path.read_text("utf-8")):
            assert describe(name), path


def test_every_name_that_is_described_is_written_by_code() -> None:
    """Literally, or by an f-string such as `f"critic/{name}"` whose variable part is a text of the code too."""
    root, texts, patterns = Path(rlhf.__file__).parents[1], set(), set()
    for package in ("rlhf", "agents", "environments", "rewards"):
        for path in (root / package).rglob("*.py"):
            if path == root / "rlhf" / "metrics.py":
                continue
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.add(node.value)
                if isinstance(node, ast.JoinedStr):
                    parts = [re.escape(str(p.value)) if isinstance(p, ast.Constant) else "(.+)" for p in node.values]
                    patterns.add("".join(parts))
    formed = [re.compile(pattern) for pattern in patterns if re.match(r"[a-z_]+/|\(\.\+\)/[a-z_]", pattern)]

    def is_written(name: str) -> bool:
        if name in texts or name in _BY_USERS or (name.endswith("/*") and name[:-2] in texts):
            return True
        found = (match for pattern in formed if (match := pattern.fullmatch(name)))
        return (name.endswith("/*") and any(True for _ in found)) or any(
            all(part in texts or part.rpartition("_")[0] in texts for part in match.groups())
            for pattern in formed
            if (match := pattern.fullmatch(name))
        )

    assert [name for name in METRICS if not is_written(name)] == []


def test_each_old_name_has_a_present_one_and_is_refused_with_it() -> None:
    of_families = {"judge/*": "judge/age", "tokens_of_age/*": "tokens_of_age/0"}
    for old in RENAMED_METRICS:
        old = of_families.get(old, old.replace("*", "loss"))
        new = present_name(old)
        assert describe(new) and present_name(new) == new
        with pytest.raises(DataError, match=f"it is now called {new}"):
            describe(old)


def test_a_log_of_an_earlier_release_is_read_under_present_names_and_goes_on(tmp_path: Path) -> None:
    path, old = tmp_path / "metrics.jsonl", {"loss/sampler_gap_mean": 0.5, "judge/audit_accuracy": 0.75, "custom/n": 1}
    path.write_text(json.dumps({"step": 1, "stage": "a", "time": 0.0, **old}) + "\n")
    metrics = Metrics([JsonlSink(path)])
    for _ in range(2):
        metrics.rewind("a", 1)
        metrics.log(2, "a", {"loss/sampler_logprob_diff_mean": 0.25})
    metrics.close()
    assert "sampler_gap_mean" in path.read_text()  # what is logged is not rewritten: checkpoints know its digest
    for data in (RunData.read(tmp_path), RunFolder(tmp_path).poll()):
        assert data.values("loss/sampler_logprob_diff_mean") == [0.5, 0.25]
        assert set(data.lines[0].values) == {
            "loss/sampler_logprob_diff_mean",
            "judge_refresh/audit_accuracy",
            "custom/n",
        }


#: Families for metrics of one's own.
_BY_USERS = {"custom/*"}


def test_a_family_admits_any_name_below_it_but_not_itself() -> None:
    assert describe("reward/format").name == "reward/*"
    assert describe("custom/deep/name").name == "custom/*"
    for name in ("reward/", "reward/*", "reward", "loss/mine"):
        with pytest.raises(DataError):
            describe(name)


@pytest.mark.parametrize("value", ["high", None, [1.0, 2.0], np.zeros(2)])
def test_a_value_that_is_no_number_is_an_error(value: object) -> None:
    with pytest.raises(DataError, match="not a number"):
        Metrics().log(0, "train", {"loss/policy": value})


def test_a_line_holds_step_stage_time_and_values(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    metrics = Metrics([JsonlSink(path)])
    metrics.log(3, "train", {"loss/policy": np.float32(0.5), "rollout/n_episodes": 8, "loss/entropy": math.nan})
    [text] = path.read_text().splitlines()  # flushed, though the sink is open
    record = json.loads(text)
    assert record.pop("time") > 1e9
    assert record == {
        "step": 3,
        "stage": "train",
        "loss/policy": 0.5,
        "rollout/n_episodes": 8.0,
        "loss/entropy": None,  # JSON has no NaN
    }
    metrics.close()


def test_a_sink_that_is_opened_again_appends_and_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Metrics([JsonlSink(path)])
    first.log(1, "train", {"loss/policy": 1.0})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 2, "sta')  # the process was killed while it wrote
    assert logged(path) == [("train", 1)]
    second = Metrics([JsonlSink(path)])
    second.log(2, "train", {"loss/policy": 2.0})
    second.close()
    assert logged(path) == [("train", 1), ("train", 2)]


def test_a_damaged_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "stage": "a", "time": 0}\nrubbish\n{"step": 2, "stage": "a", "time": 0}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


def test_rewinding_keeps_what_lies_before_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics([JsonlSink(path)])
    for stage, steps in (("0-supervised", 3), ("1-policy_gradient", 5), ("2-policy_gradient", 2)):
        for step in range(1, steps + 1):
            metrics.log(step, stage, {"optimizer/lr": step})
    metrics.log(2, "2-policy_gradient", {"eval/success": 0.5})
    metrics.rewind("1-policy_gradient", 2)
    metrics.log(3, "1-policy_gradient", {"optimizer/lr": 30})
    metrics.close()
    assert logged(path) == [*(("0-supervised", i) for i in (1, 2, 3)), *(("1-policy_gradient", i) for i in (1, 2, 3))]
    assert read_metrics(path)[-1].values["optimizer/lr"] == 30


def test_rewinding_to_a_stage_not_begun_ends_where_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics([JsonlSink(path)])
    metrics.log(1, "a", {"optimizer/lr": 1})
    metrics.log(1, "b", {"optimizer/lr": 1})
    metrics.rewind("b", 0)
    assert logged(path) == [("a", 1)]
    metrics.rewind("b", 0)
    assert logged(path) == [("a", 1)]
    metrics.rewind("", 0)
    assert logged(path) == []
    metrics.close()


@given(stop=st.integers(0, 12), resume=st.integers(0, 12))
def test_an_interrupted_log_equals_an_uninterrupted_one(
    tmp_path_factory: pytest.TempPathFactory, stop: int, resume: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    resume = min(resume, stop)
    first = Metrics([JsonlSink(path)])
    for step in range(1, stop + 1):
        first.log(step, "train", {"optimizer/lr": step})
    first.close()
    second = Metrics([JsonlSink(path)])
    second.rewind("train", resume)
    for step in range(resume + 1, 13):
        second.log(step, "train", {"optimizer/lr": step})
    second.close()
    assert logged(path) == [("train", step) for step in range(1, 13)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_says_so() -> None:
    sink = JsonlSink(Path("/dev/full"))
    with pytest.raises(CheckpointError, match="No space left") as caught:
        Metrics([sink]).log(0, "train", {"loss/policy": 1.0})
    assert "free disk space" in str(caught.value)


def test_tensorboard_reads_back_what_was_logged_without_doubles(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics([TensorboardSink(tmp_path)])
    for step in (1, 2, 3):
        metrics.log(step, "train", {"rollout/success": step / 10, "loss/entropy": math.inf})
    metrics.rewind("train", 1)
    metrics.log(2, "train", {"rollout/success": 0.9})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "train")).Reload()
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("rollout/success")] == [(1, 0.1), (2, 0.9)]
    assert events.Tags()["scalars"] == ["rollout/success"]  # what is not finite is no point of a curve


def test_importing_metrics_loads_neither_torch_nor_tensorboard() -> None:
    code = "import sys, rlhf.sinks; print([m for m in ('torch', 'tensorboard', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
