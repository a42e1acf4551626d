"""Memory of trainers, counted off the shapes of what they train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf.estimate.meta import Parameter, count
from rlhf.training.backends.settings import DeepSpeed, Torch
from rlhf.training.backends.sharding import sharding_of

#: Numbers of gathered parameters that ZeRO 3 keeps at a time, at most.
_ZERO3_LIVE = 1_000_000_000


def trainer_bytes(parameters: Sequence[Parameter], kind: Any, n_processes: int) -> dict[str, int]:
    """Bytes of the policy's trainer in each process: what it holds, and what an update adds.

    Of a parameter in bfloat16, eight processes and ZeRO 2: weights 2, gradients 4 / 8, weights in float32 (`masters`)
    4 / 8, moments 8 / 8. Plain torch in bfloat16: 2, 4, 4 and 8; in float32: 4, 4, 0 and 8.

    Args:
        parameters: of the policy, adapters and what lies under them.
        kind: of the trainer, a stage's `trainer`.
        n_processes: that share the stage.
    """
    sharding = sharding_of(kind)
    trained = [p for p in parameters if p.is_trained]
    weights, of_trained = sum(p.n_bytes for p in parameters), 4 * sum(p.n for p in trained)
    if not sharding.optimizer:
        masters = 4 * sum(p.n for p in trained if p.size < 4)
        # The update takes a root of every mean square at once.
        return {
            "weights": weights, "gradients": of_trained, "masters": masters,
            "moments": of_trained * (1 if isinstance(kind, Torch) and kind.moments == "bfloat16" else 2),
            "update": of_trained,
        }  # fmt: skip
    if sharding.parameters:
        sizes = [4 if p.is_trained and not sharding.has_master_weights else p.size for p in parameters]
        pieces = [p.n if p.n < sharding.min_numel else -(-p.n // n_processes) for p in parameters]
        weights = int(sum(size * n for size, n in zip(sizes, pieces, strict=True)))
    n_trained = sum(p.n for p in trained)
    share = -(-n_trained // n_processes)
    of_one = 2 if kind.precision == "float16" else 4  # gradients of bfloat16 are added up in float32
    gradients = of_one * (share if sharding.gradients else n_trained)
    # The update has the roots, and beside masters its gradients in float32 once more.
    masters, update = (4 * share, 8 * share) if sharding.has_master_weights else (0, 4 * share)
    return {"weights": weights, "gradients": gradients, "masters": masters, "moments": 8 * share, "update": update}


def alone(parameters: Sequence[Parameter]) -> dict[str, int]:
    """Bytes of a model that is trained beside the policy, whole and by plain torch in each process."""
    return trainer_bytes(parameters, Torch(), 1)


def parts_on_host(kind: Any) -> set[str]:
    """Parts that lie in host memory though the policy is on a GPU."""
    if isinstance(kind, Torch):
        return {"masters", "moments"} if kind.offload_moments else set()
    found = {"masters", "moments"} if isinstance(kind, DeepSpeed) and kind.offload_optimizer else set()
    if found and sharding_of(kind).gradients:
        found.add("gradients")
    return found | ({"weights"} if isinstance(kind, DeepSpeed) and kind.offload_parameters else set())


def buffers(parameters: Sequence[Parameter], kind: Any, config: Any) -> int:
    """Return the bytes in which gradients wait to be summed, and those of layers that are gathered.

    ZeRO has a bucket, which is there in full however small the model is. Else embedding and output layer are gathered,
    and two layers, one of them ahead of its use; gradients are whole for embedding, output layer and one layer, and
    once more in float32 while they are summed.

    Args:
        parameters: of the policy.
        kind: of the trainer.
        config: of the model.
    """
    sharding = sharding_of(kind)
    if not sharding.optimizer:
        return 0
    size = max(p.size for p in parameters)
    n, n_trained = count(parameters)
    if sharding.bucket_bytes:
        gathered = min(n, _ZERO3_LIVE) * size if sharding.parameters else 0
        return int(sharding.bucket_bytes + gathered)
    text = config.get_text_config()
    ends = [p for p in parameters if p.n == text.vocab_size * text.hidden_size]
    (of_ends, trained_ends), n_layers = count(ends), text.num_hidden_layers
    gathered = n if sharding.keeps_full_weights else min(n, of_ends + 2 * (n - of_ends) // n_layers)
    a_layer = (n_trained - trained_ends) // n_layers
    return int((gathered + trained_ends + a_layer) * size + 4 * max(trained_ends, a_layer))
