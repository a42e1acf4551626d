"""FSDP2 in two gloo processes: each holds its share only, and what they compute is what plain torch computes.

Both processes go through every case once; what they saw comes back in a file each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf.batching.samples import Sample
from rlhf.losses.ppo_clip import PPOClip
from rlhf.processes import current
from rlhf.training.backends.settings import DeepSpeed, Fsdp, Torch
from rlhf.training.backends.sharded import cast_parameters
from rlhf.training.checkpoints.store import load_trainer
from rlhf.training.policy.model import Lora, Policy
from rlhf.training.publisher import adapter_parameters
from rlhf.training.publisher import parameters as published
from tests.training.test_deepspeed import (
    N_UPDATES,
    POLICIES,
    SCHEDULE,
    Curve,
    Weights,
    assert_same,
    broken_of,
    buffers_of,
    go_on,
    in_rows,
    rows,
    scores_of,
    train,
    weights_of,
    whole_of,
)
from tests.training.tiny import policy
from tests.training.together import together

FSDP, SHORT = Fsdp(), Fsdp(precision="bfloat16")
#: Keys that change memory and messages, and no figure.
VARIANTS = {
    "kept whole": Fsdp(reshard_after_forward=False),
    "recomputed": Fsdp(gradient_checkpointing=True),
    "recomputed and kept whole": Fsdp(gradient_checkpointing=True, reshard_after_forward=False),
}
#: Curve and weights at a stretch, and with a checkpoint on the way.
Resumed = tuple[Curve, Curve, Weights, Weights]


# --- what runs in each of the two processes ---------------------------------------------------------------------------


def work(rank: int, folder: Path) -> dict[str, Any]:
    samples, place = rows(), folder / f"checkpoint-{rank}"
    place.mkdir()
    found: dict[str, Any] = {}
    for form, lora in POLICIES.items():
        trainer, curve = train(FSDP, lora, samples)
        found[f"held {form}"] = _held(trainer)
        found[f"published {form}"] = {name: value.clone() for name, value in published(trainer.policy.model)}
        if lora:
            walked = adapter_parameters(trainer.policy.model)
            found["adapter"] = {name: value.detach().clone() for name, value in walked}
        trainer.policy.save(folder / f"{form}-{rank}")
        trainer.close()
        found[form] = (curve, weights_of(trainer.policy))
        found[f"left {form}"] = [(type(p).__name__, p.requires_grad) for p in trainer.policy.model.parameters()]
        found[f"resumed {form}"] = _resumed([(FSDP, 3), (FSDP, 8)], samples, place, lora)
    found["resumed bfloat16"] = _resumed([(SHORT, 3), (SHORT, 8)], samples, place)
    found["resumed bfloat16 lora"] = _resumed([(SHORT, 3), (SHORT, 8)], samples, place, Lora(rank=2))
    if find_spec("deepspeed"):
        zero3 = DeepSpeed(zero_stage=3, param_persistence_threshold=0)
        found["elsewhere"] = _resumed([(FSDP, 3), (zero3, 5), (FSDP, 8)], samples, place)
    found["bfloat16"] = _in_bfloat16(samples, folder / f"bfloat16-{rank}")
    found["whole"] = whole_of(FSDP, samples)
    found["scores"] = scores_of(FSDP, samples)
    found["broken"] = broken_of(FSDP, samples)
    found["raised"] = _raised(VARIANTS["kept whole"], samples)
    for name, kind in VARIANTS.items():
        found[name] = train(kind, None, samples, end=6)[1]
    return found


def _held(trainer: Any) -> dict[str, tuple[set[str], int, int, int]]:
    """Of weights, gradients and moments: types, numbers and bytes in this process, and numbers in all."""
    made = list(trainer.policy.model.parameters())
    trained = [p for p in made if p.requires_grad]
    states = [trainer.optimizer.state[p] for p in trained]
    tensors = {"weights": [p.detach() for p in made], "gradients": [p.grad for p in trained]}
    tensors |= {name: [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")}
    return {name: _sizes(values) for name, values in tensors.items()}


def _sizes(values: Sequence[Any]) -> tuple[set[str], int, int, int]:
    local = [value.to_local() for value in values]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local if t.numel()}
    n_here, n_in_all = (sum(t.numel() for t in tensors) for tensors in (local, values))
    return {type(value).__name__ for value in values}, n_here, sum(storages.values()), n_in_all


def _resumed(
    legs: Sequence[tuple[Any, int]], samples: Sequence[Sample], place: Path, lora: Lora | None = None
) -> Resumed:
    """Updates by the first kind at a stretch; and by each kind up to a number of updates, with checkpoints between."""
    first, end = legs[0][0], legs[-1][1]
    whole, expected = train(first, lora, samples, end=end)
    whole.close()
    made, curve, begin = policy(lora=lora), list[dict[str, float]](), 0
    names = [name for name, p in made.model.named_parameters() if p.requires_grad]
    for kind, until in legs:
        trainer = kind.start(made, SCHEDULE, N_UPDATES)
        if begin:
            load_trainer(place, trainer.optimizer, names=names)
        trainer.n_updates = begin
        curve += go_on(trainer, samples, begin, until)
        begin = until
        state = current().from_main(trainer.optimizer.state_dict(), "the optimiser")
        torch.save({"optimizer": state, "torch_rng": torch.get_rng_state(), "kept": {}}, place / "trainer.pt")
        trainer.close()
    return expected, curve, weights_of(whole.policy), weights_of(made)


def _in_bfloat16(samples: Sequence[Sample], folder: Path) -> dict[str, Any]:
    """A policy in bfloat16, with an update by which most weights do not move in that format."""
    made = policy()
    cast_parameters(made.model, torch.bfloat16)
    slow = replace(SCHEDULE, lr=1e-5, warmup_steps=0)
    trainer = FSDP.start(made, slow, N_UPDATES)
    values = trainer.update(in_rows(samples, 4), PPOClip())
    master = trainer.optimizer.state_dict()["state"]
    made.save(folder)
    said = {"held": _held(trainer), "dtype": made.model.dtype, "logged": values}
    said["buffers"] = buffers_of(made.model)
    said["published"] = {str(value.dtype) for _, value in published(made.model)}
    trainer.close()
    said["buffers"] |= buffers_of(made.model)
    return said | {"masters": [state["master"] for state in master.values()], "left": weights_of(made)}


def _raised(kind: Fsdp, samples: Sequence[Sample]) -> tuple[str, Curve]:
    """A loss that fails behind the forward pass, and the updates after it."""
    trainer = kind.start(policy(), SCHEDULE, N_UPDATES)

    def fails(inputs: Any) -> Any:
        raise ValueError(f"a loss of {len(inputs.policy_logprobs) > 0}")

    try:
        trainer.update(in_rows(samples, 4), fails)
        said = ""
    except ValueError as error:
        said = str(error)
    curve = go_on(trainer, samples, 0, 3)
    trainer.close()
    return said, curve


# --- what came back ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    return together(work, folder, timeout_s=300.0)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return rows()


@pytest.fixture(scope="module")
def alone(samples: list[Sample]) -> dict[str, tuple[Curve, Policy]]:
    """Plain torch in this process: curve and policy of each form."""
    trained = {form: train(Torch(), lora, samples) for form, lora in POLICIES.items()}
    return {form: (curve, trainer.policy) for form, (trainer, curve) in trained.items()}


@pytest.mark.parametrize("form", POLICIES)
def test_twenty_updates_equal_plain_torch(
    seen: list[dict[str, Any]], alone: dict[str, tuple[Curve, Policy]], form: str
) -> None:
    expected, made = alone[form]
    assert len(expected) == 20
    assert max(v["optimizer/grad_norm"] for v in expected) > SCHEDULE.max_grad_norm  # the bound has an effect
    for found in seen:
        curve, weights = found[form]
        assert_same(curve, expected, atol=1e-4)
        assert weights.keys() == weights_of(made).keys()
        for name, value in weights_of(made).items():
            torch.testing.assert_close(weights[name], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", POLICIES)
def test_each_process_holds_its_share(seen: list[dict[str, Any]], form: str) -> None:
    for what in ("weights", "gradients", "exp_avg", "exp_avg_sq"):
        found = [one[f"held {form}"][what] for one in seen]
        n = found[0][3]
        assert all(types == {"DTensor"} for types, *_ in found)
        assert sum(n_here for _, n_here, _, _ in found) == n > 0
        for _, n_here, n_bytes, _ in found:
            assert n_here == pytest.approx(n / 2, rel=0.02)  # a row that cannot be cut lies in the first process
            assert 4 * n_here <= n_bytes <= 1.15 * 4 * n / 2  # gradients of a layer share a buffer, filled up


@pytest.mark.parametrize("form", POLICIES)
def test_the_first_process_writes_an_ordinary_model(seen: list[dict[str, Any]], folder: Path, form: str) -> None:
    file = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}[form]
    saved = load_file(folder / f"{form}-0" / file)
    _, weights = seen[0][form]
    expected = {
        key.replace(".default.", "."): value for key, value in weights.items() if form == "full" or ".lora_" in key
    }
    expected.pop("lm_head.weight", None)  # tied
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], value) for key, value in expected.items())
    assert not (folder / f"{form}-1").exists()
    if form == "full":
        assert '"Qwen3ForCausalLM"' in (folder / "full-0" / "config.json").read_text()


@pytest.mark.parametrize("form", POLICIES)
def test_a_stage_leaves_an_ordinary_policy(
    seen: list[dict[str, Any]], alone: dict[str, tuple[Curve, Policy]], form: str
) -> None:
    expected = [(type(p).__name__, p.requires_grad) for p in alone[form][1].model.parameters()]
    assert all(found[f"left {form}"] == expected for found in seen)


def test_published_weights_are_whole_with_adapters_merged(
    seen: list[dict[str, Any]], alone: dict[str, tuple[Curve, Policy]]
) -> None:
    for form, (_, made) in alone.items():
        expected = {name: value.clone() for name, value in published(made.model)}
        for found in seen:
            assert found[f"published {form}"].keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[f"published {form}"][name], value, atol=1e-5, rtol=0)


def test_an_adapter_is_published_alone(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        factors = {n.replace(".default", ""): v for n, v in found["lora"][1].items() if ".lora_" in n}
        assert found["adapter"].keys() == factors.keys() and factors
        assert all(torch.equal(found["adapter"][name], value) for name, value in factors.items())


@pytest.mark.parametrize("name", ["full", "lora", "bfloat16", "bfloat16 lora"])
def test_resume_is_exact(seen: list[dict[str, Any]], name: str) -> None:
    for found in seen:
        at_a_stretch, resumed, expected, weights = found[f"resumed {name}"]
        assert len(resumed) == 8 and resumed == at_a_stretch
        assert all(torch.equal(weights[key], value) for key, value in expected.items())
        assert {value.dtype for value in weights.values()} == {torch.float32}, "the policy has its own format again"


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_a_checkpoint_goes_to_zero_3_and_back(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        at_a_stretch, resumed, expected, weights = found["elsewhere"]
        assert_same(resumed, at_a_stretch, atol=1e-5)
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, atol=1e-5, rtol=0)


def test_bfloat16_has_masters_in_pieces(seen: list[dict[str, Any]], folder: Path) -> None:
    short = policy()
    cast_parameters(short.model, torch.bfloat16)
    before = weights_of(short)
    for rank, found in enumerate(seen):
        said = found["bfloat16"]
        assert said["buffers"] == {"torch.float32"}, "angles of positions need more than 16 bits"
        assert said["dtype"] == torch.bfloat16 and said["published"] == {"torch.bfloat16"}
        types, n_here, n_bytes, n = said["held"]["weights"]
        assert types == {"DTensor"} and n_here == pytest.approx(n / 2, rel=0.02)
        assert n_bytes == pytest.approx(4 * n / 2, rel=0.02)  # float32
        assert {value.dtype for value in said["left"].values()} == {torch.bfloat16}
        still = [torch.equal(value, said["left"][name]) for name, value in before.items()]
        assert 0 <= said["logged"]["optimizer/changed_share"] < 0.2
        assert any(still)
        if rank == 0:
            assert all(master.dtype == torch.float32 for master in said["masters"])
            assert sum(master.numel() for master in said["masters"]) == n
            moved = torch.cat([(m - m.bfloat16().float()).flatten() for m in said["masters"]])
            assert (moved != 0).float().mean() > 0.5  # what rounding would have lost
    saved = load_file(folder / "bfloat16-0" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    assert '"dtype": "bfloat16"' in (folder / "bfloat16-0" / "config.json").read_text()


def test_bfloat16_learns_as_plain_torch_does(seen: list[dict[str, Any]], samples: list[Sample]) -> None:
    short = policy()
    cast_parameters(short.model, torch.bfloat16)
    expected = go_on(Torch(compile=False).start(short, SCHEDULE, N_UPDATES), samples, 0, 8)
    for found in seen:
        curve = found["resumed bfloat16"][0]
        for number, (got, wanted) in enumerate(zip(curve, expected, strict=True)):
            # The same passes in the first update; then rounding takes the weights apart.
            assert got["loss/total"] == pytest.approx(wanted["loss/total"], abs=1e-6 if number == 0 else 0.01)
            assert got["loss/entropy"] == pytest.approx(wanted["loss/entropy"], abs=0.01)
            assert got["optimizer/grad_norm"] == pytest.approx(
                wanted["optimizer/grad_norm"], rel=1e-3 if number == 0 else 0.25
            )
            assert got["optimizer/changed_share"] == pytest.approx(wanted["optimizer/changed_share"], abs=0.02)


def test_whole_trajectories_and_the_base_as_reference(seen: list[dict[str, Any]], samples: list[Sample]) -> None:
    for found in seen:
        assert_same(found["whole"], whole_of(Torch(), samples))


def test_scores_come_back_in_order(seen: list[dict[str, Any]], samples: list[Sample]) -> None:
    expected = scores_of(Torch(), samples)
    for found in seen:
        for name, values in expected.items():
            for got, wanted in zip(found["scores"][name], values, strict=True):
                torch.testing.assert_close(torch.from_numpy(got), torch.from_numpy(wanted), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_memory_keys_leave_the_curve(
    seen: list[dict[str, Any]], alone: dict[str, tuple[Curve, Policy]], name: str
) -> None:
    for found in seen:
        assert_same(found[name], alone["full"][0][:6])


def test_a_gradient_that_is_not_finite_is_skipped_by_all(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        broken = found["broken"]
        assert broken["skipped"] == (1, 0) and broken["updated"] == 1
        assert 0 < broken["norm"] < math.inf
        assert "not finite" in broken["said"]


def test_updates_go_on_after_a_loss_that_raised(
    seen: list[dict[str, Any]], alone: dict[str, tuple[Curve, Policy]]
) -> None:
    for found in seen:
        said, curve = found["raised"]
        assert said == "a loss of True"
        assert_same(curve, alone["full"][0][:3])
