"""The share of weights that an update changes: counted rightly, and worth a word where it is 0."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.losses.ppo_clip import PPOClip
from rlhf.training.backends import changed_share
from rlhf.training.backends.changed_share import MAX_STILL, N_EACH, N_PLACES, Changes, NoUpdateMonitor, places_in
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from tests.training import runs
from tests.training.test_deepspeed import in_rows, rows
from tests.training.tiny import policy

N = 2000


def share_after(dtype: torch.dtype, lr: float, *, masters: bool = True, still: int = 0) -> float:
    """Share of weights of some 0.02 that an update with a gradient changes; the first `still` of them have none."""
    model = torch.nn.Linear(N, 1, bias=False)
    rng = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(model.weight, std=0.02, generator=rng)
    model.to(dtype)
    optimizer, changes = AdamW(lr=lr).build(model.parameters(), masters=masters), Changes(model)
    slope = torch.randn(N, generator=rng)
    slope[:still] = 0
    (model.weight * slope.to(dtype)).sum().backward()
    changes.begin()
    optimizer.step()
    assert changes.n == N
    return int(changes.end()) / N


def test_every_weight_of_a_small_model_is_looked_at() -> None:
    assert share_after(torch.float32, 1e-6) == 1
    assert share_after(torch.float32, 1e-6, still=500) == 0.75
    assert share_after(torch.float32, 1e-16) == 0


def test_in_16_bits_most_weights_stay_and_with_masters_they_move_in_the_end() -> None:
    # Half a step between two bfloat16 numbers near 0.02 is 6e-5, so that only weights near 0 move by 1e-6.
    in_place = share_after(torch.bfloat16, 1e-6, masters=False)
    assert 0 < in_place < 0.05
    assert share_after(torch.bfloat16, 1e-6) == pytest.approx(in_place, abs=0.01)  # of the first update
    assert share_after(torch.bfloat16, 1e-14) == share_after(torch.bfloat16, 1e-14, masters=False) == 0
    assert share_after(torch.bfloat16, 1e-2) > 0.99


def test_places_are_the_same_each_time_and_spread_by_size() -> None:
    sizes = [10, 100_000, 300_000, 7]
    found = places_in(sizes)
    assert all(np.array_equal(places, places_in(sizes)[number]) for number, places in found.items())
    assert set(found) == {1, 2} and sum(map(len, found.values())) == N_PLACES * N_EACH
    assert len(found[2]) == pytest.approx(0.75 * N_PLACES * N_EACH, rel=0.05)
    for number, places in found.items():
        assert len(set(places.tolist())) == len(places) and 0 <= places.min() < places.max() < sizes[number]
        ranks = np.sort(places) / sizes[number]
        assert np.abs(ranks - (np.arange(len(ranks)) + 0.5) / len(ranks)).max() < 1e-3


def test_a_tensor_smaller_than_the_sample_is_looked_at_whole() -> None:
    [places] = places_in([50]).values()
    assert places.tolist() == list(range(50))


# --- trainers ---------------------------------------------------------------------------------------------------------

SETTINGS = AdamW(lr=1e-3)


def test_an_update_that_is_left_out_changes_nothing() -> None:
    trainer = TorchTrainer(policy(), SETTINGS, 3)
    [batch] = in_rows(rows(), 100)
    batch.weights[:] = math.inf
    values = trainer.update([batch], PPOClip())
    assert trainer.n_skipped == 1 and values["optimizer/changed_share"] == 0


def test_only_16_bits_without_masters_are_rounded_in_place() -> None:
    made = policy()
    assert not TorchTrainer(made, SETTINGS, 1).rounds_in_place
    made.model.to(torch.bfloat16)
    trainer = TorchTrainer(made, SETTINGS, 1)
    assert not trainer.rounds_in_place
    trainer.optimizer = SETTINGS.build(made.model.parameters(), masters=False)
    assert trainer.rounds_in_place


# --- cautions ---------------------------------------------------------------------------------------------------------


def values(share: float, *, lr: float = 1e-6, norm: float = 1.0) -> dict[str, float]:
    return {"optimizer/changed_share": share, "optimizer/lr": lr, "optimizer/grad_norm": norm}


def said(still: NoUpdateMonitor, *steps: dict[str, float], in_place: bool = False) -> list[dict[str, str]]:
    return [still.learn(step, "step 9 of a stage", peak=1e-6, in_place=in_place) for step in steps]


def test_some_steps_in_a_row_without_a_change_are_worth_a_word() -> None:
    still = NoUpdateMonitor()
    *quiet, last = said(still, *[values(0)] * MAX_STILL)
    assert not any(quiet) and list(last) == ["still"]
    assert "none of the sampled weights has changed in the 5 steps up to step 9 of a stage" in last["still"]
    assert not any(said(still, values(1e-4), *[values(0)] * (MAX_STILL - 1)))


@pytest.mark.parametrize("passed_over", [{}, values(0, lr=4e-7), values(0, norm=0), values(0, norm=math.inf)], ids=str)
def test_steps_that_were_to_change_little_are_passed_over(passed_over: dict[str, float]) -> None:
    still = NoUpdateMonitor(MAX_STILL - 1)
    assert not any(said(still, *[passed_over] * 3)) and still.n == MAX_STILL - 1
    assert any(said(still, values(0)))


def test_what_is_rounded_away_in_place_is_said_at_once() -> None:
    [found, other] = said(NoUpdateMonitor(), values(0.012), values(0.9), in_place=True)
    assert list(found) == ["in_place"] and "changed 1.2% of the weights" in found["in_place"] and not other


STANDING = {"lr": 1e-18, "schedule": "constant", "warmup_steps": 0}


def test_a_run_whose_weights_stand_still_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        changed_share, "N_EACH", 1
    )  # none of the padding token's, which begin at 0 and move at any rate
    stage = {"kind": "supervised", "n_demonstrations": 16, "batch_size": 4, "epochs": 2, "optimizer": STANDING}
    done = runs.run(runs.write(tmp_path / "recipe", [stage], evaluation={"n_tasks": 2}), tmp_path / "run")
    assert done.said.count("caution: none of the sampled weights has changed in the 5 steps up to update 5 of") == 1
    assert [line["optimizer/changed_share"] for line in runs.lines(done.folder) if "optimizer/lr" in line] == [0] * 8
