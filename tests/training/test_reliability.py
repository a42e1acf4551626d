"""Reliability: what a model says of how likely something is, against how often it was so."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.errors import DataError
from rlhf.evaluation.run_data import RunData
from rlhf.evaluation.statistics import share_interval, success_estimate
from rlhf.sinks import LogLine
from rlhf.training.contrib.calibration import Bin, bins_of, calibration_error, sureness, write_held_out
from rlhf.viewer.evaluation_views import judges


def test_probabilities_are_put_together_with_what_happened() -> None:
    # Five parts of [.5, 1]: .5 and .55 in the first, .7 on a border and so in [.7, .8), .95 and 1 in the last.
    said, happened = [0.5, 0.55, 0.7, 0.95, 1.0], [False, True, True, True, True]
    bins = bins_of(said, happened, list("abcde"), success_estimate, least=0.5)
    assert [(b.n, b.said, b.share) for b in bins] == [
        (2, pytest.approx(0.525), 0.5),
        (1, 0.7, 1.0),
        (2, pytest.approx(0.975), 1.0),
    ]
    assert (bins[0].low, bins[0].high) == pytest.approx(share_interval(1, 2))
    # (2 · .025 + 1 · .3 + 2 · .025) / 5
    assert calibration_error(bins) == pytest.approx(0.08)


def test_the_calibration_error_is_weighed_by_how_often() -> None:
    bins = [Bin(3, 0.9, 0.6, 0, 1), Bin(1, 0.5, 1.0, 0, 1)]
    assert calibration_error(bins) == pytest.approx(0.35)  # ¾ · .3 + ¼ · .5
    assert calibration_error([]) == 0.0


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=30))
def test_every_probability_is_in_one_bin_and_the_error_is_a_share(rows: list[tuple[float, bool]]) -> None:
    said, happened = [p for p, _ in rows], [h for _, h in rows]
    bins = bins_of(said, happened, [str(i) for i in range(len(rows))], success_estimate, n_bins=7)
    assert sum(b.n for b in bins) == len(rows)
    assert math.fsum(b.n * b.said for b in bins) == pytest.approx(math.fsum(said))
    assert sum(b.n * b.share for b in bins) == pytest.approx(sum(happened))
    assert 0 <= calibration_error(bins) <= 1
    assert all(b.low <= b.share <= b.high for b in bins)


def test_what_is_no_probability_is_refused() -> None:
    for said, happened in (([0.4], [True]), ([1.1], [True]), ([math.nan], [True]), ([0.6], [])):
        with pytest.raises(DataError, match="invalid probabilities"):
            bins_of(said, happened, ["a"], success_estimate, least=0.5)


def test_a_choice_is_as_sure_as_the_difference_is_large() -> None:
    assert sureness(0.0) == 0.5
    assert sureness(-0.9) == sureness(0.9) == pytest.approx(0.710950)  # 1 / (1 + e^−.9)
    assert sureness(800.0) == 1.0


def test_the_page_has_what_the_file_beside_the_model_says(tmp_path: Path) -> None:
    folder = tmp_path / "reward_model" / "1-reward_model"
    folder.mkdir(parents=True)
    write_held_out(
        tmp_path,
        "reward_model/1-reward_model",
        {"of": "pairs", "n": 4, "accuracy": 0.75},
        [Bin(4, 0.8, 0.75, 0.3, 0.95)],
    )
    data = RunData(tmp_path, [], {}, {}, {})
    [model] = judges(tmp_path, data)["models"]
    assert (model["title"], model["of"], model["accuracy"]) == ("Reward model of 1-reward_model", "pairs", 0.75)
    assert model["bins"] == [{"n": 4, "said": 0.8, "share": 0.75, "low": 0.3, "high": 0.95}]
    assert judges(tmp_path / "nothing", data) == {"models": [], "audits": [], "problems": []}
    for damage in ("{", '{"bins": []}', "[]"):
        (folder / "held_out.json").write_text(damage)
        found = judges(tmp_path, data)
        assert not found["models"] and "damaged" in found["problems"][0]


def test_audits_of_judges_have_their_intervals(tmp_path: Path) -> None:
    values = {
        "judge_refresh/audit_accuracy": 0.8,
        "judge_refresh/audit_accuracy_low": 0.6,
        "judge_refresh/audit_accuracy_high": 0.9,
    }
    lines = [LogLine(step, "0-pg", float(step), values) for step in (4, 8)]
    [audit] = judges(tmp_path, RunData(tmp_path, lines, {}, {}, {}))["audits"]
    assert (audit["steps"], audit["values"], audit["low"], audit["high"]) == ([4, 8], [0.8] * 2, [0.6] * 2, [0.9] * 2)
