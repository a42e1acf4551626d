"""The trainer on real DeepSpeed, in two processes joined by gloo: what it computes is what plain torch computes.

Both processes go through every case once; what they saw comes back in a file each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.batching.pack import PackedBatch, collate, pack_minibatches
from rlhf.batching.samples import Sample, make_samples
from rlhf.credit.grpo import GRPO
from rlhf.errors import TrainingError
from rlhf.inference.role_adapters import adapter_of
from rlhf.losses.gspo import GSPO
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reduction import Reduction
from rlhf.processes import current
from rlhf.training.backends import token_stats
from rlhf.training.backends.compiled import decoder_layers
from rlhf.training.backends.optimizer import MAX_SKIPPED, AdamW
from rlhf.training.backends.settings import DeepSpeed, Torch
from rlhf.training.backends.sharded import assembled, cast_parameters
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.backends.zero_optimizer_state import GatheredOptimizerState
from rlhf.training.policy.model import Lora, Policy
from tests.training.alike import assert_alike
from tests.training.tiny import collect, credit, parameters, policy
from tests.training.together import together

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

#: Parameters of 16 to 5 thousand numbers lie in pieces only if nothing this small stays whole.
WHOLE = {"param_persistence_threshold": 0}

KINDS = {f"zero{zero}": DeepSpeed(zero_stage=zero, **WHOLE) for zero in (0, 1, 2, 3)}  # type: ignore[arg-type]
POLICIES = {"full": None, "lora": Lora(rank=2)}
SCHEDULE = AdamW(lr=1e-3, schedule="cosine", warmup_steps=3, max_grad_norm=0.5)
#: An ε this large makes the step of Adam a smooth function of the gradient, so that rounding stays rounding.
SMOOTH = AdamW(lr=0.1, eps=1e-2, max_grad_norm=None)
N_UPDATES = 20

Curve = list[dict[str, float]]
Weights = dict[str, torch.Tensor]


def rows() -> list[Sample]:
    """Rows of 4 groups of 3, of one to three turns."""
    groups = collect(policy(), n_tasks=4)
    samples, _ = make_samples(groups, credit(groups, GRPO()))
    return samples


def in_rows(samples: Sequence[Sample], n: int) -> list[PackedBatch]:
    """One minibatch in micro-batches of `n` rows."""
    counts = np.array([s.n_policy_tokens for s in samples])
    weights = Reduction()(counts, np.array([s.sequence for s in samples]))
    return [
        collate(samples[i : i + n], weights[i : i + n], n_minibatch_tokens=int(counts.sum()))
        for i in range(0, len(samples), n)
    ]


def buffers_of(model: Any) -> set[str]:
    """Number formats of the buffers that are no integers."""
    return {str(buffer.dtype) for buffer in model.buffers() if buffer.is_floating_point()}


def weights_of(made: Policy) -> Weights:
    return {name: value.clone() for name, value in made.model.state_dict().items()}


def train(kind: Any, lora: Lora | None, samples: Sequence[Sample], begin: int = 0, end: int = N_UPDATES) -> Any:
    """A trainer after its updates, with the curve."""
    trainer = kind.start(policy(lora=lora), SCHEDULE, N_UPDATES)
    return trainer, go_on(trainer, samples, begin, end)


def go_on(trainer: TorchTrainer, samples: Sequence[Sample], begin: int, end: int) -> Curve:
    found = []
    for update in range(begin, end):
        rng = np.random.default_rng(update)
        chosen, other = pack_minibatches(samples, 2, Reduction(), 200, rng, n_least=trainer.n_processes)
        loss = PPOClip(entropy_coef=0.01)
        found.append(trainer.update(chosen if update % 2 else other, loss))
    return found


# --- what runs in each of the two processes ---------------------------------------------------------------------------


def work(rank: int, folder: Path) -> dict[str, Any]:
    samples = rows()
    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        for form, lora in POLICIES.items():
            trainer, curve = train(kind, lora, samples)
            trainer.policy.save(folder / f"{name}-{form}-{rank}")
            trainer.close()
            found[f"{name}-{form}"] = (curve, weights_of(trainer.policy))
        found[f"{name}-resumed"] = _resumed(kind, kind, samples)
        found[f"{name}-broken"] = broken_of(kind, samples)
    found["moved"] = _resumed(KINDS["zero3"], KINDS["zero1"], samples)
    found["rows"] = {n: _by_rows(KINDS["zero2"], samples, n) for n in (1, 2, 8)}
    found["scores"] = scores_of(KINDS["zero3"], samples)
    found["whole"] = {name: whole_of(KINDS[name], samples) for name in ("zero1", "zero3")}
    others = {
        "offloaded optimizer": DeepSpeed(zero_stage=2, offload_optimizer=True),
        "offloaded parameters": DeepSpeed(zero_stage=3, offload_parameters=True, offload_optimizer=True, **WHOLE),
        "recomputed": DeepSpeed(zero_stage=2, gradient_checkpointing=True),
        "recomputed in pieces": DeepSpeed(zero_stage=3, gradient_checkpointing=True, **WHOLE),
    }
    for name, kind in others.items():
        found[name] = train(kind, None, samples, end=6)[1]
    token_stats.PIECE, piece = (
        2000,
        token_stats.PIECE,
    )  # a few tokens at a time: the layer's weights are gathered once for all
    found["logits in pieces"] = train(KINDS["zero3"], None, samples, end=6)[1]
    token_stats.PIECE = piece
    found["unused zero0"] = _unused(KINDS["zero0"], samples)
    for zero in (1, 2, 3):
        kind = DeepSpeed(zero_stage=zero, precision="bfloat16", **WHOLE)  # type: ignore[arg-type]
        found[f"bfloat16 zero{zero}"] = _resumed(kind, kind, samples)
        found[f"buffers zero{zero}"] = _buffers(kind, samples)
        found[f"unused zero{zero}"] = _unused(kind, samples)
    found["gradients after bfloat16"] = _gradients_after(
        DeepSpeed(zero_stage=1, precision="bfloat16", **WHOLE), samples
    )
    return found


def _gradients_after(kind: DeepSpeed, samples: Sequence[Sample]) -> set[torch.dtype]:
    """Number formats of the gradients of a policy that this trainer has left."""
    trainer, _ = train(kind, None, samples, end=2)
    trainer.close()
    model = trainer.policy.model
    model(input_ids=torch.tensor([[3, 4, 5]])).logits.sum().backward()
    return {p.grad.dtype for p in model.parameters() if p.grad is not None}


def _buffers(kind: DeepSpeed, samples: Sequence[Sample]) -> set[str]:
    """Number formats of the buffers, in a stage and after it."""
    trainer, _ = train(kind, None, samples, end=1)
    found = buffers_of(trainer.policy.model)
    trainer.close()
    return found | buffers_of(trainer.policy.model)


def _unused(kind: DeepSpeed, samples: Sequence[Sample]) -> list[float]:
    """Largest change of a role's adapter by an update without its rows, one of them, two without any, and another."""
    made = policy(lora=Lora(rank=2, roles=("plan",)))
    trainer = kind.start(made, SMOOTH, 4)
    own = [replace(s, adapter="plan") for s in samples]
    moved = []
    for n, rows_ in enumerate((samples, own, samples, samples, own), 1):
        before = _of_role(made.model)
        trainer.update(in_rows(rows_, 4), PPOClip())
        moved.append(float((_of_role(made.model) - before).abs().max()))
        assert trainer.optimizer.state_dict()["n_steps"] == n
    trainer.close()
    return moved


def _of_role(model: Any) -> torch.Tensor:
    with assembled(model, lambda path: ".lora_" in path):
        return torch.cat([p.detach().float().flatten() for n, p in model.named_parameters() if adapter_of(n) == "plan"])


def _resumed(first: DeepSpeed, second: DeepSpeed, samples: Sequence[Sample]) -> tuple[Curve, Curve, Weights, Weights]:
    """Curve and weights of 8 updates at a stretch, and of 3 and 5 with a checkpoint between them."""
    whole, curve = train(first, None, samples, end=8)
    interrupted, before = train(first, None, samples, end=3)
    state = current().from_main(interrupted.optimizer.state_dict(), "the optimiser")
    interrupted.close()
    trainer = second.start(interrupted.policy, SCHEDULE, N_UPDATES)
    trainer.optimizer.load_state_dict(state)
    trainer.n_updates = 3
    after = go_on(trainer, samples, 3, 8)
    for one in (whole, trainer):
        one.close()
    return curve, before + after, weights_of(whole.policy), weights_of(trainer.policy)


def broken_of(kind: Any, samples: Sequence[Sample]) -> dict[str, Any]:
    """What becomes of gradients that are not finite, first one, then too many."""
    trainer = kind.start(policy(), SCHEDULE, N_UPDATES)
    [good] = pack_minibatches(samples, 1, Reduction(), 200, n_least=2)
    # In the share of one process only.
    bad = [replace(good[0], weights=good[0].weights * torch.inf), *good[1:]]
    trainer.update(bad, PPOClip())
    skipped = (trainer.n_skipped, trainer.n_updates)
    norm = trainer.update(good, PPOClip())["optimizer/grad_norm"]
    try:
        for _ in range(MAX_SKIPPED):
            trainer.update(bad, PPOClip())
    except TrainingError as error:
        said = error.what
    trainer.close()
    return {"skipped": skipped, "norm": norm, "updated": trainer.n_updates, "said": said}


def _by_rows(kind: Any, samples: Sequence[Sample], n: int) -> tuple[dict[str, float], torch.Tensor]:
    trainer = kind.start(policy(), SMOOTH, 1)
    values = trainer.update(in_rows(samples, n), PPOClip(entropy_coef=0.01))
    trainer.close()
    return values, parameters(trainer.policy.model)


def scores_of(kind: Any, samples: Sequence[Sample]) -> dict[str, Any]:
    trainer = kind.start(policy(), SMOOTH, 1)
    found: dict[str, Any] = trainer.compute_token_stats(samples, ("entropy",), temperature=0.7, max_tokens=200)
    trainer.close()
    return found


def whole_of(kind: Any, samples: Sequence[Sample]) -> Curve:
    """Updates of a loss that looks at whole trajectories, which lie in several micro-batches, beside a reference."""
    trainer = kind.start(policy(lora=Lora(rank=2)), SMOOTH, 3)
    cut = [replace(s, sequence=s.sequence // 2) for s in samples]
    found = [trainer.update(in_rows(cut, 3), GSPO(kl="k3", kl_coef=0.1)) for _ in range(3)]
    trainer.close()
    return found


# --- what came back ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    return together(work, folder)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return rows()


def assert_same(curve: Curve, expected: Curve, atol: float = 1e-4) -> None:
    assert len(curve) == len(expected)
    for got, wanted in zip(curve, expected, strict=True):
        assert_alike(got, wanted, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("form", POLICIES)
@pytest.mark.parametrize("name", KINDS)
def test_the_curve_is_that_of_one_process_with_plain_torch(
    seen: list[dict[str, Any]], samples: list[Sample], name: str, form: str
) -> None:
    trainer, expected = train(Torch(), POLICIES[form], samples)
    assert max(v["optimizer/grad_norm"] for v in expected) > SCHEDULE.max_grad_norm  # the bound has an effect
    for found in seen:
        curve, weights = found[f"{name}-{form}"]
        assert_same(curve, expected)
        assert weights.keys() == weights_of(trainer.policy).keys()
        for key, value in weights_of(trainer.policy).items():
            torch.testing.assert_close(weights[key], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", POLICIES)
@pytest.mark.parametrize("name", KINDS)
def test_the_first_process_writes_an_ordinary_model(
    seen: list[dict[str, Any]], folder: Path, name: str, form: str
) -> None:
    from safetensors.torch import load_file

    file = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}[form]
    saved = load_file(folder / f"{name}-{form}-0" / file)
    _, weights = seen[0][f"{name}-{form}"]
    expected = {
        key.replace(".default.", "."): value for key, value in weights.items() if form == "full" or ".lora_" in key
    }
    expected.pop("lm_head.weight", None)  # tied
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], value) for key, value in expected.items())
    assert not (folder / f"{name}-{form}-1").exists()


@pytest.mark.parametrize("name", [*KINDS, "moved"])
def test_a_checkpoint_changes_nothing(seen: list[dict[str, Any]], name: str) -> None:
    for found in seen:
        at_a_stretch, resumed, expected, weights = found["moved" if name == "moved" else f"{name}-resumed"]
        assert name == "moved" or resumed == at_a_stretch
        assert_same(resumed, at_a_stretch, atol=1e-5)
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, atol=0 if name != "moved" else 1e-6, rtol=0)


@pytest.mark.parametrize("name", KINDS)
def test_a_gradient_that_is_not_finite_is_left_out(seen: list[dict[str, Any]], name: str) -> None:
    for found in seen:
        broken = found[f"{name}-broken"]
        assert broken["skipped"] == (1, 0) and broken["updated"] == 1
        assert 0 < broken["norm"] < math.inf
        assert "not finite" in broken["said"]


def test_the_loss_does_not_depend_on_micro_batches(seen: list[dict[str, Any]], samples: list[Sample]) -> None:
    values, weights = _by_rows(Torch(), samples, len(samples))
    for found in seen:
        for n in (1, 2, 8):
            got, moved = found["rows"][n]
            assert_alike(got, values, atol=1e-5, rtol=1e-6)
            torch.testing.assert_close(moved, weights, atol=1e-6, rtol=0)


def test_scores_come_back_in_order(seen: list[dict[str, Any]], samples: list[Sample]) -> None:
    expected = scores_of(Torch(), samples)
    for found in seen:
        for name, values in expected.items():
            for got, wanted in zip(found["scores"][name], values, strict=True):
                np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_trajectories_that_lie_in_both_processes_are_seen_whole(
    seen: list[dict[str, Any]], samples: list[Sample], name: str
) -> None:
    for found in seen:
        assert_same(found["whole"][name], whole_of(Torch(), samples))


@pytest.mark.parametrize(
    "name", ["offloaded optimizer", "offloaded parameters", "recomputed", "recomputed in pieces", "logits in pieces"]
)
def test_memory_is_saved_and_the_curve_stays(seen: list[dict[str, Any]], samples: list[Sample], name: str) -> None:
    _, expected = train(Torch(), None, samples, end=6)
    for found in seen:
        assert_same(found[name], expected)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bfloat16_learns_alike_and_resumes_exactly(
    seen: list[dict[str, Any]], samples: list[Sample], zero: int
) -> None:
    _, expected = train(Torch(), None, samples, end=8)
    short = policy()
    cast_parameters(short.model, torch.bfloat16)
    in_short = go_on(Torch(compile=False).start(short, SCHEDULE, N_UPDATES), samples, 0, 8)
    for found in seen:
        curve, resumed, weights, again = found[f"bfloat16 zero{zero}"]
        assert resumed == curve
        assert all(torch.equal(again[key], value) for key, value in weights.items())
        assert {value.dtype for value in weights.values()} == {torch.float32}, "the policy has its own format again"
        for got, wanted in zip(curve, expected, strict=True):
            # Eight bits of a log-prob of some nats.
            assert got["loss/entropy"] == pytest.approx(wanted["loss/entropy"], abs=0.05)
            assert got["optimizer/grad_norm"] == pytest.approx(wanted["optimizer/grad_norm"], rel=0.2)
        changed, wanted_changed = ([v["optimizer/changed_share"] for v in one] for one in (curve, in_short))
        assert changed == pytest.approx(wanted_changed, abs=0.05) and 0 < min(changed) < max(changed) < 0.9


def test_gradients_after_a_stage_have_the_format_of_the_policy(seen: list[dict[str, Any]]) -> None:
    assert all(found["gradients after bfloat16"] == {torch.float32} for found in seen)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_16_bits_are_those_of_the_weights_and_not_of_positions(seen: list[dict[str, Any]], zero: int) -> None:
    assert all(found[f"buffers zero{zero}"] == {"torch.float32"} for found in seen)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_adapter_that_reads_nothing_stays(seen: list[dict[str, Any]], zero: int) -> None:
    for found in seen:
        none_yet, first, *none, last = found[f"unused zero{zero}"]
        assert min(first, last) > 1e-5 and [none_yet, *none] == [0, 0, 0]


def test_torch_recomputes_too(samples: list[Sample]) -> None:
    _, expected = train(Torch(), Lora(rank=2), samples, end=4)
    for share, n in ((True, 2), (0.5, 1)):
        trainer, curve = train(Torch(gradient_checkpointing=share), Lora(rank=2), samples, end=4)
        assert_same(curve, expected, atol=1e-6)
        assert sum(layer.gradient_checkpointing for layer in decoder_layers(trainer.policy.model)) == n
    trainer.close()
    assert not any(getattr(m, "gradient_checkpointing", False) for m in trainer.policy.model.modules())


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (None, "cpu")])
def test_the_number_of_steps_of_a_fused_optimizer_lies_where_its_parameters_do(fused: bool | None, device: str) -> None:
    module = torch.nn.Linear(2, 1, bias=False, device="meta")
    optimizer = SimpleNamespace(param_groups=[{"params": [module.weight], "fused": fused}])
    engine = SimpleNamespace(module=module, optimizer=optimizer, basic_optimizer=SimpleNamespace(state={}))
    state = GatheredOptimizerState(engine, 0, keeps=True, has_master_weights=False)
    saved = {"weight": {"exp_avg": torch.zeros(1, 2), "exp_avg_sq": torch.zeros(1, 2)}}
    state.load_state_dict({"n_steps": 3, "parameters": saved, "scaler": {}})
    assert state.state[module.weight]["step"].device.type == device
