"""FLOPs of a model, by hand and as counted, and the rates that come of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import Sample
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reduction import Reduction
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.policy.model import Lora, Policy
from rlhf.training.throughput import Meter, ModelFlops, peak_flops
from tests.training.tiny import policy

#: Rows of 12 tokens that begin with other tokens, 5 of each sampled; of one length, so that none is padded.
N_ROWS, LENGTH, N_SAMPLED = 3, 12, 5


def rows() -> list[Sample]:
    mask = np.arange(LENGTH) >= LENGTH - N_SAMPLED
    zeros = np.zeros(LENGTH, np.float32)
    ids = [np.arange(LENGTH, dtype=np.int64) + 20 * i for i in range(N_ROWS)]
    return [Sample(ids[i], mask, zeros, mask.astype(np.float32), i, 0) for i in range(N_ROWS)]


def in_place_flops(total: Any, left: Any, right: Any, **_: Any) -> int:
    return int(2 * left[0] * left[1] * right[1])


def counted(made: Policy) -> tuple[dict[str, int], Meter]:
    """FLOPs of an update by what torch counts of it: matrix products with weights, and those of attention."""
    trainer = TorchTrainer(made, AdamW(max_grad_norm=None), 1)
    [batches] = pack_minibatches(rows(), 1, Reduction(), 10_000)
    trainer.compute_logprobs(rows(), temperature=1.0, max_tokens=10_000)  # the first pass is made twice
    in_place = {torch.ops.aten.addmm_: in_place_flops}  # which torch does not count by itself
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        trainer.update(batches, PPOClip())
    found = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    return {
        "weights": sum(n for op, n in found.items() if "bmm" not in op),
        "attention": found["aten.bmm"],
    }, trainer.meter


def test_flops_of_a_small_model_by_hand_and_as_counted() -> None:
    made = policy()
    config: Any = made.model.config
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    width = config.num_attention_heads * config.head_dim
    small = config.num_key_value_heads * config.head_dim
    layer = hidden * (width + 2 * small) + width * hidden + 3 * hidden * inner  # q, k, v; o; gate, up, down
    flops = ModelFlops.of(made.model)
    assert flops == ModelFlops(6.0 * 2 * layer, 6.0 * 2 * width, 6.0 * hidden * vocab)
    by_hand = N_ROWS * (12 * layer * LENGTH + 12 * width * LENGTH**2 + 6 * hidden * vocab * N_SAMPLED)
    assert flops([LENGTH] * N_ROWS, N_ROWS * N_SAMPLED) == by_hand
    found, meter = counted(made)
    assert meter.n_tokens == N_ROWS * LENGTH and meter.done == by_hand
    # Torch's plain attention computes the upper triangle too, which the causal half leaves out.
    assert found["weights"] + found["attention"] / 2 == by_hand


def test_weights_of_a_frozen_base_count_four_and_those_of_the_adapter_six() -> None:
    made = policy(lora=Lora(rank=2))
    config: Any = made.model.config
    hidden = config.hidden_size
    width, small = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    adapter = sum(p.numel() for p in made.model.parameters() if p.requires_grad)
    linear = [m for m in made.model.modules() if isinstance(m, torch.nn.Linear)]
    head = made.model.get_base_model().get_output_embeddings()
    base = sum(m.weight.numel() for m in linear if not m.weight.requires_grad and m is not head)
    flops = ModelFlops.of(made.model)
    assert flops is not None and flops.per_token == 4 * base + 6 * adapter
    assert flops.per_target == 4 * hidden * config.vocab_size
    found, meter = counted(made)
    # Nobody asks for the gradient of what enters the first layer: 2 of q, k and v and of their adapters' first half.
    n_tokens = N_ROWS * LENGTH
    asked = {
        name.rpartition("layers.0.self_attn.")[2][:6] for name, p in made.model.named_parameters() if p.requires_grad
    }
    first = hidden * (width + 2 * small) + 2 * hidden * len(asked & {"q_proj", "k_proj", "v_proj"})
    assert found["weights"] + found["attention"] / 2 == meter.done - 2 * first * n_tokens


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
    ],
)
def test_peaks_go_by_what_the_gpu_is_called(name: str, tera: float) -> None:
    assert peak_flops(name) == tera * 1e12


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H1000", "Tesla T4", ""]
)
def test_a_gpu_of_another_name_has_no_known_peak(name: str) -> None:
    assert peak_flops(name) is None


def test_rates_are_of_what_came_since_the_last_call() -> None:
    # 2 rows of 10 tokens, 4 of each trained on: 2 (7 · 10 + 3 · 100 + 5 · 4) = 780 FLOPs, in 2 s of a GPU of 1,000/s.
    meter = Meter(ModelFlops(7.0, 3.0, 5.0), 1000.0)
    [batches] = pack_minibatches(
        [
            Sample(np.arange(10) + i, np.arange(10) > 5, *(np.zeros(10, np.float32),) * 2, sequence=i, group=0)
            for i in range(2)
        ],
        1,
        Reduction(),
        15,
    )
    assert len(batches) == 2
    meter.add(batches)
    assert meter.rates(2.0) == {"train/tokens_per_s": 10.0, "train/mfu": 0.39}
    assert meter.rates(2.0) == {"train/tokens_per_s": 0.0, "train/mfu": 0.0}
    meter.peak = None
    assert meter.rates(2.0) == {"train/tokens_per_s": 0.0}


def test_a_mixture_of_experts_has_no_known_flops() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=50, hidden_size=8, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8, num_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    assert ModelFlops.of(Qwen3MoeForCausalLM(config)) is None
