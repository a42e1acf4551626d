"""Rows shared by two processes: what they compute is what one process computes of whole rows."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.batching.samples import Sample
from rlhf.errors import TrainingError
from rlhf.losses.gspo import GSPO
from rlhf.losses.ppo_clip import PPOClip
from rlhf.training.backends.settings import DeepSpeed, Fsdp, Torch
from rlhf.training.backends.sharding import heads_problem, heads_rule
from rlhf.training.policy.model import Lora
from tests.training import children
from tests.training.alike import assert_alike
from tests.training.test_deepspeed import SCHEDULE, SMOOTH, in_rows, rows, weights_of
from tests.training.test_deepspeed_runs import ROOT, command
from tests.training.tiny import policy
from tests.training.together import together
from tests.training.two_processes import figures

SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": Lora(rank=2)},
    "one key-value head": {"n_kv_heads": 1},
}
KINDS: dict[str, Any] = {
    "fsdp": Fsdp(sequence_parallel=2),
    "recomputed": Fsdp(sequence_parallel=2, gradient_checkpointing=0.5),
}
if find_spec("deepspeed"):
    KINDS |= {
        f"zero{n}": DeepSpeed(zero_stage=n, sequence_parallel=2, param_persistence_threshold=0) for n in (0, 2, 3)
    }
LOSSES = {"a token at a time": PPOClip(entropy_coef=0.01), "whole rows": GSPO()}


def learned(kind: Any, samples: Sequence[Sample], loss: Any, **shape: Any) -> Any:
    """Curve of three updates, weights after them, and log-probs of all rows before."""
    trainer = kind.start(policy(**shape), SMOOTH, 3)
    scores = trainer.compute_token_stats(samples, ("entropy",), temperature=0.7, max_tokens=200)
    # An odd number of rows, so that tokens do not divide; some rows share what they begin with.
    curve = [trainer.update(in_rows(samples, 5), loss) for _ in range(3)]
    trainer.close()
    return curve, weights_of(trainer.policy), scores


def cases() -> list[tuple[str, str, str]]:
    found = [(kind, "full", name) for kind in KINDS for name in LOSSES]
    one = "zero2" if "zero2" in KINDS else "fsdp"
    return found + [(one, shape, "a token at a time") for shape in ("lora", "one key-value head")]


def work(rank: int, folder: Path) -> dict[Any, Any]:
    samples, found = rows(), dict[Any, Any]()
    for kind, shape, loss in cases():
        found[kind, shape, loss] = learned(KINDS[kind], samples, LOSSES[loss], **SHAPES[shape])
    try:
        Fsdp(sequence_parallel=2).start(policy(n_heads=3, head_dim=6, hidden_size=18), SCHEDULE, 1)
    except TrainingError as error:
        found["heads"] = str(error)
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return together(work, tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize(("kind", "shape", "loss"), cases())
def test_shared_rows_learn_what_whole_ones_do(seen: list[dict[Any, Any]], kind: str, shape: str, loss: str) -> None:
    curve, weights, scores = learned(Torch(), rows(), LOSSES[loss], **SHAPES[shape])
    for found in seen:
        got, moved, scored = found[kind, shape, loss]
        for one, expected in zip(got, curve, strict=True):
            assert one["optimizer/grad_norm"] > 0
            assert_alike(one, expected, atol=1e-5, rtol=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(moved[name], value, atol=1e-5, rtol=0)
        for name, values in scores.items():
            for row, wanted in zip(scored[name], values, strict=True):
                np.testing.assert_allclose(row, wanted, atol=1e-5)


def test_heads_that_do_not_divide_are_refused(seen: list[dict[Any, Any]]) -> None:
    assert "3 attention heads" in seen[0]["heads"] and "one of 1, 3" in seen[0]["heads"]


def test_processes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(TrainingError, match="start 2 processes"):
        Fsdp(sequence_parallel=2).start(policy(), SCHEDULE, 1)


def test_which_numbers_of_processes_go_with_which_heads() -> None:
    assert heads_problem(8, 16, 2) is None  # each key-value head goes to four processes
    assert heads_problem(6, 12, 4) == "the model has 4 key-value heads"
    assert heads_problem(3, 16, 8) == "the model has 16 attention heads"
    assert heads_rule(16, 8) == "one of 1, 2, 4, 8, 16"


@pytest.mark.extended
def test_the_command_line_shares_rows_too(tmp_path: Path) -> None:
    smoke, shared = (
        ROOT / "recipes" / "fsdp" / "smoke-cpu.yaml",
        [f"stages.{i}.trainer.sequence_parallel=2" for i in (0, 1)],
    )
    both = command(smoke, *shared, "--out", tmp_path / "both")
    assert both.returncode == 0, both.stderr
    alone = children.run(tmp_path, "train", smoke, "--out", tmp_path / "alone")
    assert alone.code == 0, alone.err
    for (stage, got), (_, wanted) in zip(figures(tmp_path / "both"), figures(tmp_path / "alone"), strict=True):
        # The engine holds a copy, and the difference from the trainer is rounding.
        assert_alike(got, {k: wanted.get(k, v) for k, v in got.items()}, stage, atol=1e-4, rtol=1e-4)
