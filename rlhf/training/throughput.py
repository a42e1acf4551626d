"""Tokens per second and model FLOPs utilisation (MFU) of training.

Counted is what the model asks for, whatever is done in fact: an update of rows of L tokens, of which n are trained on,
takes FLOPs of

    Σ over rows  c · (weights of the layers) · L  +  6 · layers · heads · head size · L²  +  c · (output layer) · n

- c is 6 for a weight that is trained: 2 in the forward pass, 2 for the gradient of its input, 2 for its own. It is 4
  for a frozen one, as the base of LoRA is, whose own gradient nobody asks for; the adapter beside it counts 6.
- Attention is 12 · layers · heads · head size · L for each token, halved as it is causal.
- Weights are those of linear layers. The embedding multiplies nothing; as an output layer, tied or not, it counts for
  the tokens that are trained on, the only ones whose logits are computed.
- Recomputed activations do not count: with them it would be hardware FLOPs utilisation, with c = 8. Neither do forward
  passes without a gradient, of the reference, a teacher or old log-probs. A prompt that rows share, which is computed
  once, counts in each of them.

A layer of weights 100, trained, 2 layers of 2 heads of 8, an output layer of 50, one row of 10 tokens of which 4 are
trained on: 6 · 100 · 10 + 6 · 2 · 16 · 100 + 6 · 50 · 4 = 26400.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from rlhf.batching.pack import PackedBatch, shapes_of
from rlhf.processes import current
from rlhf.training.policy.lora import causal_of

#: Peak of dense products in bfloat16 with sums in float32, in TFLOP/s, by words of what the GPU is called; the longest
#: name that fits counts. NVIDIA's and AMD's data sheets, halved where these count with sparsity.
PEAKS: Mapping[str, float] = MappingProxyType(
    {
        "A100": 312.0, "A800": 312.0, "H100": 989.4, "H100 PCIe": 756.0, "H100 NVL": 835.5, "H800": 989.4,
        "H800 PCIe": 756.0, "H200": 989.4, "H200 NVL": 835.5, "GH200": 989.4, "B200": 2250.0, "A10": 125.0,
        "A30": 165.0, "A40": 149.7, "L4": 121.0, "L40": 181.0, "L40S": 362.0, "RTX A6000": 154.8, "RTX 6000 Ada": 364.2,
        "RTX 3090": 71.0, "RTX 4090": 165.2, "RTX 5090": 209.5, "MI300X": 1307.4,
    }
)  # fmt: skip
#: Words behind a name that make it another GPU, or a part of one.
_OTHERS = {"mig", "laptop", "d", "max", "ti"}


def peak_flops(name: str) -> float | None:
    """Return the FLOP/s in bfloat16 of the GPU of that name, as `torch.cuda.get_device_name` has it; None: unknown."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    if _OTHERS & set(words):
        return None
    fitting = [key for key in PEAKS if _holds(words, key.lower().split())]
    return PEAKS[max(fitting, key=len)] * 1e12 if fitting else None


def _holds(words: Sequence[str], wanted: Sequence[str]) -> bool:
    return any(list(words[i : i + len(wanted)]) == list(wanted) for i in range(len(words)))


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of forward and backward pass of a model.

    Attributes:
        per_token: of the layers' weights, each token.
        per_square: of attention, each token squared of a row.
        per_target: of the output layer, each token that is trained on.
    """

    per_token: float
    per_square: float
    per_target: float

    @classmethod
    def of(cls, model: Any) -> ModelFlops | None:
        """FLOPs of a causal language model, with or without adapters; None where its weights are not all used.

        So it is of a mixture of experts, of which each token meets a few.
        """
        base = causal_of(model)
        config = base.config.get_text_config()
        said: dict[str, Any] = config.to_dict()
        if any(said.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            return None
        head = base.get_output_embeddings()
        in_head = set(head.modules()) if head is not None else set()
        layers = sum(_of_linear(path, m) for path, m in base.named_modules() if m not in in_head)
        heads = getattr(config, "num_attention_heads", 0)
        kinds = set(said.get("layer_types") or ["full_attention"])
        if not layers or not heads or kinds != {"full_attention"}:
            return None  # layers of another kind than these formulas know
        width = heads * (said.get("head_dim") or config.hidden_size // heads)
        of_head = sum(_of_linear(path, m) for path, m in head.named_modules()) if head is not None else 0.0
        return cls(layers, 6.0 * config.num_hidden_layers * width, of_head)

    def __call__(self, lengths: Iterable[int], n_targets: int) -> float:
        """FLOPs of an update on rows of these lengths, with this many trained tokens."""
        lengths = list(lengths)
        of_rows = self.per_token * sum(lengths) + self.per_square * sum(n * n for n in lengths)
        return of_rows + self.per_target * n_targets


def _of_linear(path: str, module: nn.Module) -> float:
    """FLOPs of a linear layer per token; 0 for other modules, and adapters of roles but the shared one."""
    if not isinstance(module, nn.Linear) or re.search(r"lora_[AB]\.(?!default$)", path):
        return 0.0
    # Sizes, and no number of elements: weights in 4 bits are packed, and DeepSpeed takes some to pieces.
    return (6.0 if module.weight.requires_grad else 4.0) * module.in_features * module.out_features


@dataclass
class Meter:
    """Counts what a trainer has trained on.

    Attributes:
        flops: of the model; None where they are not known.
        peak: FLOP/s of the device, None where they are not known.
        n_tokens: of all rows so far, each as often as it was gone through.
        done: FLOPs so far, by all processes.
    """

    flops: ModelFlops | None = None
    peak: float | None = None
    n_tokens: int = 0
    done: float = 0.0
    _last: tuple[int, float] = field(default=(0, 0.0))

    @classmethod
    def of(cls, model: Any) -> Meter:
        """Return one that begins to count. The peak is that of 16 bits, so it is known of a model in these alone."""
        is_short = model.dtype in (torch.bfloat16, torch.float16)
        on_gpu = is_short and torch.cuda.is_available()
        return cls(ModelFlops.of(model), peak_flops(torch.cuda.get_device_name()) if on_gpu else None)

    def add(self, batches: Sequence[PackedBatch]) -> None:
        """Take in the micro-batches of an update."""
        for lengths, n_targets in shapes_of(batches):
            self.n_tokens += sum(lengths)
            if self.flops is not None:
                self.done += self.flops(lengths, n_targets)

    def rates(self, seconds: float) -> dict[str, float]:
        """Throughput metrics since the last call, over `seconds`; each process has a GPU."""
        (n_tokens, done), self._last = self._last, (self.n_tokens, self.done)
        seconds = max(seconds, 1e-9)
        found = {"train/tokens_per_s": (self.n_tokens - n_tokens) / seconds}
        if self.flops is not None and self.peak is not None:
            found["train/mfu"] = (self.done - done) / (seconds * self.peak * current().n)
        return found
