"""Extension of vLLM's worker processes that loads weights and reports which were loaded.

vLLM imports this module by name: `worker_extension_cls` is `rlhf.inference.vllm.worker.Worker`, whose methods become
the
worker's and are called by `collective_rpc`. The import registers the way weights travel, "rlhf_memory", beside vLLM's
own "nccl" and "ipc".

Traps, on a CPU. Linear layers, the output layer among them, hold packed copies of their weights, so an output layer
that is tied to the embeddings keeps its old copy when the embeddings change. It is packed again after every update. And
a request with a seed whose prompt is computed in pieces ends the engine, see `spare_generators`.
"""

from __future__ import annotations

from binascii import a2b_base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from rlhf.inference import adapter_files
from rlhf.inference.fingerprint import Digest
from rlhf.inference.transfer import RemoteReceiver, SharedMemoryReceiver, Slice, token_digest
from rlhf.inference.transfer_cuda import DeviceReceiver, gpu_of
from rlhf.inference.transfer_group import GroupReceiver, Rendezvous, join
from rlhf.inference.vllm.process import detach
from rlhf.inference.vllm.start import MEMORY


@dataclass
class MemoryInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The sender's file; empty where this machine does not have it, and its bytes come in messages.

    `group` is where a process group meets, and the rank of this instance's first worker in it.
    """

    path: str
    on_gpu: bool = False
    group: dict[str, Any] | None = None


@dataclass
class MemoryUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Slices in the buffer: name, dtype, shape, offset, bytes; on a GPU also its handle."""

    slices: list[list[Any]] = field(default_factory=list)
    address: dict[str, Any] = field(default_factory=dict)


class MemoryTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Weight receiver in the worker: from shared memory, the GPU, or messages."""

    init_info_cls = MemoryInit
    update_info_cls = MemoryUpdate
    receiver: SharedMemoryReceiver | DeviceReceiver | GroupReceiver | RemoteReceiver | None = None
    digest = Digest()
    in_place = False
    tied: Mapping[str, str] = MappingProxyType({})
    twins: dict[str, str]

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        if device.type == "cpu":  # vLLM itself would find out at the first request, and end
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

            width, kernels = vllm_config.model_config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
            if width not in kernels:
                raise ValueError(f"no kernel on a CPU for head_dim {width}, only for {', '.join(map(str, kernels))}")

    def init_transfer_engine(self, init_info: MemoryInit) -> None:
        """Note where the sender writes; an earlier sender is forgotten."""
        self.shutdown()
        if init_info.on_gpu:
            self.receiver = DeviceReceiver(self.device)
            return
        if init_info.group is not None:
            at = dict(init_info.group)
            mine = (
                self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank
            )
            rank = int(at.pop("first_rank")) + mine
            self.receiver = GroupReceiver(join(Rendezvous(**at), rank, self.device), self.device)
            return
        self.receiver = SharedMemoryReceiver(Path(init_info.path)) if init_info.path else RemoteReceiver()

    def start_weight_update(self) -> None:
        """Begin a weight update: in place where parameters are plain, else layer by layer."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.digest, self.twins = Digest(), {}
        self.in_place = is_plain(self.model, self.device)
        self.tied = tied_names(self.model) if self.in_place else {}
        if not self.in_place:
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: MemoryUpdate) -> None:
        """Load one buffer."""
        try:
            if isinstance(self.receiver, DeviceReceiver):
                self.receiver.open(update_info.address)
            self.model.load_weights(self._received(update_info.slices))
            if self.device.type == "cuda":  # the sender may write the next buffer when this returns
                torch.cuda.current_stream(self.device).synchronize()
        except BaseException:  # vLLM ends the update here, and would begin the next one in the middle of this one
            self._abandon()
            raise

    def put(self, place: int, data: bytes) -> None:
        """Take in a piece of the next buffer."""
        if not isinstance(self.receiver, RemoteReceiver):
            raise RuntimeError("no sender has announced that it sends pieces")
        self.receiver.write(place, data)

    def _received(self, rows: list[list[Any]]) -> list[tuple[str, torch.Tensor]]:
        """The tensors in the buffer, which the digest has seen."""
        if self.receiver is None:
            raise RuntimeError("no sender has announced itself")
        found = []
        for name, tensor in self.receiver.read(
            Slice(n, dtype, tuple(shape), at, size) for n, dtype, shape, at, size in rows
        ):
            self.digest.add(name, tensor)
            if name in self.tied or name in self.tied.values():
                self.twins[name] = digest_of(tensor)
            if name in self.tied:  # vLLM would miss the other name, which may have come with another buffer
                continue
            # What is loaded by layers waits for the rest of its layer, which may come with the next buffer.
            is_kept = not self.in_place and isinstance(self.receiver, DeviceReceiver | GroupReceiver)
            found.append((name, tensor.clone() if is_kept else tensor.to(self.device)))
        return found

    def finish_weight_update(self) -> None:
        """Put the last layers in place."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        for name, other in self.tied.items():
            if name in self.twins and self.twins[name] != self.twins.get(other):
                raise RuntimeError(f"{name} is {other} in this engine, and other values came for it")
        try:
            if not self.in_place:
                finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:
            self._abandon()
            raise
        if isinstance(self.receiver, RemoteReceiver):
            self.receiver.close()  # until the next update the memory is better used otherwise
        head = getattr(self.model, "lm_head", None)
        if self.device.type == "cpu" and head is not None and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)

    def _abandon(self) -> None:
        """Restore the old parameters of incomplete layers, so that they can be loaded again."""
        from vllm.model_executor.model_loader.reload import layerwise

        if self.in_place:
            return
        for layer in self.model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()

    def shutdown(self) -> None:
        """Release the sender's buffer."""
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None


class Worker:
    """Mixed into vLLM's worker; every method begins with `rlhf_`, so that none hides one of vLLM's."""

    weight_transfer_engine: Any
    model_runner: Any
    vllm_config: Any

    def rlhf_put(self, place: int, data: str) -> None:
        """Take in a piece of a buffer of parameters, in base64, from a sender on another machine."""
        self.weight_transfer_engine.put(place, a2b_base64(data, strict_mode=True))

    def rlhf_fingerprint(self) -> str:
        """Fingerprint of the parameters received by the last full update."""
        return str(self.weight_transfer_engine.digest.hexdigest())

    def rlhf_adapter_fingerprint(self, path: str) -> str:
        """Fingerprint of the adapter in a folder, as this process reads it."""
        from safetensors import safe_open

        digest = Digest()
        with safe_open(str(Path(path) / "adapter_model.safetensors"), "pt") as file:
            for name in sorted(file.keys()):
                digest.add(name, file.get_tensor(name))
        return digest.hexdigest()

    def rlhf_open_adapter(self, name: str, config: str) -> str:
        """Make a folder for an adapter that comes in pieces; where."""
        return str(adapter_files.open_adapter(name, config))

    def rlhf_write_adapter(self, name: str, place: int, data: str) -> None:
        """Take in a piece of its tensors' file, in base64."""
        adapter_files.write_adapter(name, place, a2b_base64(data, strict_mode=True))

    def rlhf_remove_adapter(self, name: str) -> None:
        """Remove its files."""
        adapter_files.remove_adapter(name)

    def rlhf_describe(self, token: str) -> Mapping[str, Any]:
        """Description of the engine that a client checks before it trusts it.

        Args:
            token: path of a small file in the client's memory; whoever knows its digest sees that memory.
        """
        model, cache = self.vllm_config.model_config, self.vllm_config.cache_config
        lora = self.vllm_config.lora_config
        transfer = self.vllm_config.weight_transfer_config
        device = getattr(self, "device", torch.device("cpu"))
        return {
            "n_vocab": int(model.get_vocab_size()),
            "max_context": int(model.max_model_len),
            "dtype": str(model.dtype).removeprefix("torch."),
            "logprobs_mode": str(model.logprobs_mode),
            "shapes": _shapes(model.hf_text_config),
            "lora_rank": 0 if lora is None else int(lora.max_lora_rank),
            "transfer": None if transfer is None else str(transfer.backend),
            "cached_tokens": int((cache.num_gpu_blocks or 0) * cache.block_size),
            "device": str(device),
            "gpu": gpu_of(device),
            "token": token_digest(Path(token)),
        }


def _shapes(config: Any) -> Mapping[str, Any]:
    """Dimensions that tell one architecture from another."""
    names: Sequence[str] = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return {name: getattr(config, name, None) for name in names}


def digest_of(tensor: torch.Tensor) -> str:
    """Digest of one tensor, whatever it is called."""
    found = Digest()
    found.add("", tensor)
    return found.hexdigest()


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Names of parameters that go by another name first, and that name."""
    first: dict[int, str] = {}
    names = ((name, first.setdefault(id(p), name)) for name, p in model.named_parameters(remove_duplicate=False))
    return {name: other for name, other in names if other != name}


def is_plain(model: torch.nn.Module, device: torch.device) -> bool:
    """True if a model computes with its parameters as loaded, so that they can be overwritten in place."""
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer

    if device.type != "cuda" or hasattr(model, "process_weights_after_loading"):
        return False
    if tied_names(model) and getattr(model, "hf_to_vllm_mapper", None) is not None:  # they come under other names
        return False
    for module in model.modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if method not in ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"):
            return False
        if hasattr(module, "lora_a_stacked") or (is_deferred_attention_layer(module) and type(module) is not Attention):
            return False
    return True


def spare_generators(runner: Any) -> None:
    """Let what is computed in pieces draw no random number before its last piece.

    vLLM samples after every piece, throws the token away, and winds the request's generator back by an offset. Those of
    a CPU have none: the engine process would end. Here they are out of reach while such a token is sampled.

    Args:
        runner: the class of vLLM's model runner.
    """
    for name in ("_sample", "_bookkeeping_sync"):
        setattr(runner, name, _without_discarded(getattr(runner, name)))


def _without_discarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        rows = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]).tolist()
        spared = {row: generators.pop(row) for row in rows if row in generators}
        try:
            return method(self, *args, **kwargs)
        finally:
            generators.update(spared)

    return wrapped


if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    spare_generators(CPUModelRunner)

WeightTransferEngineFactory.register_engine(MEMORY, MemoryTransfer)
detach()
