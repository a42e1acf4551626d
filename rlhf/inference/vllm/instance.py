"""Protocol of a running vLLM instance as `VllmEngine` uses it, and shared code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rlhf.data import Finish, SamplingParams
from rlhf.errors import DeliveryError, EngineError
from rlhf.inference.transfer import Slice

PauseMode = Literal["wait", "keep", "abort"]


class InstanceDownError(EngineError):
    """An instance does not answer any more; what it was doing may be asked of another."""


class NoInstanceError(DeliveryError):
    """No instance is left that has the weights, or could be given them."""


class InstanceStaleError(InstanceDownError):
    """Instance that answers but lost its weights: restarted, or changed by others."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in a folder. `number` and `name` are new for every delivery: vLLM never reloads one it knows."""

    name: str
    number: int
    path: Path


@dataclass(frozen=True, slots=True)
class Sampled:
    """Result of an instance for one call.

    Attributes:
        token_ids: `[T]`.
        logprobs: `[T]` in nats.
        finish: why sampling ended.
        spans: (weight version as the instance calls it, number of tokens), in order.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    spans: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Load of an engine as it reports it.

    Attributes:
        name: of the instance.
        running: requests that are sampled.
        waiting: requests that there is no room for.
        n_preempted: requests that had to give up their place, since it was started.
        cache: share of the key/value cache in use.
    """

    name: str
    running: int = 0
    waiting: int = 0
    n_preempted: int = 0
    cache: float = 0.0


class Instance(Protocol):
    """Running vLLM instance. Every method raises InstanceDownError when it does not answer, else EngineError."""

    name: str

    async def sample(
        self,
        request_id: str,
        ids: Sequence[int],
        params: SamplingParams,
        stop_ids: Sequence[int],
        adapter: Adapter | None,
    ) -> Sampled:
        """Sample once."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Let requests end at once, with what they have."""

    async def pause(self, mode: PauseMode) -> None:
        """Schedule nothing more; running requests finish, stay as they are, or end with what they have."""

    async def resume(self) -> None:
        """Schedule again."""

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker."""

    async def connect_transfer(self, info: Mapping[str, Any]) -> None:
        """Say how weights will arrive."""

    async def start_update(self) -> None:
        """Weights are about to arrive."""

    async def put(self, place: int, data: bytes) -> None:
        """Receive a base64 piece of the buffer, where the instance does not see the buffer itself."""

    async def update(self, slices: Sequence[Slice], address: Mapping[str, Any]) -> None:
        """Load what lies in the buffer, which is opened by its address if that is not empty."""

    async def finish_update(self) -> None:
        """All have arrived."""

    async def drop_cache(self) -> bool:
        """Forget all keys and values, also those of requests that go on; whether it was done."""

    async def set_version(self, version: str) -> None:
        """Name the weights."""

    async def version(self) -> str:
        """Return the name of the weights."""

    async def add_adapter(self, adapter: Adapter) -> None:
        """Load an adapter beside those in use."""

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Free an adapter."""

    async def sleep(self) -> None:
        """Give the GPU's memory back; the weights stay, elsewhere. Nothing may run."""

    async def wake(self) -> None:
        """Take the memory again."""

    async def is_up(self) -> bool:
        """True if it answers."""

    async def close(self) -> None:
        """Close the connection; an instance that this process started is stopped."""


def update_rows(slices: Sequence[Slice], address: Mapping[str, Any]) -> dict[str, Any]:
    """The message that says what lies in the buffer, and how that is opened."""
    rows = [[s.name, s.dtype, list(s.shape), s.offset, s.n_bytes] for s in slices]
    return {"slices": rows, "address": dict(address)}


def sampling_options(params: SamplingParams, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Our sampling parameters as vLLM's; only our stop ids and strings end a generation."""
    return {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": params.seed & 0x7FFF_FFFF_FFFF_FFFF,
        "stop_token_ids": list(stop_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "stop": list(params.stop_strings),
        "detokenize": bool(params.stop_strings),
        "skip_special_tokens": False,  # a stop string may name one
    }


def finish_of(reason: str | None) -> Finish:
    """The word of vLLM for why sampling ended, as ours."""
    return {"stop": Finish.STOP, "length": Finish.LENGTH}.get(reason or "", Finish.ABORT)
