"""Weights to vLLM instances, and the proof that they arrived.

The sender's digest is taken of every tensor as it is sent, the receiver's of every tensor as it is loaded; then the
instance is told the version, and asked for it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

import torch
from safetensors.torch import save_file

from rlhf.data import PolicyWeights, SamplingParams
from rlhf.errors import DeliveryError, EngineError, RlhfError
from rlhf.rollout.fingerprint import Digest
from rlhf.rollout.seeds import stable_seed
from rlhf.rollout.transfer import Outbox, memory_folder
from rlhf.rollout.vllm_instance import Adapter, Instance, InstanceDownError, PauseMode

T = TypeVar("T")

AtUpdate = Literal["drain", "keep", "abort_and_resume"]

#: How instances pause while weights arrive.
PAUSE: dict[AtUpdate, PauseMode] = {"drain": "wait", "keep": "keep", "abort_and_resume": "abort"}

#: Seconds that instances have to leave an update that failed, and to free adapters at the end.
_FINISH_S = 2.0

#: Prompts on which servers are compared.
_N_COMPARED = 8


class Deliverer:
    """Sends weights through memory that sender and instances share.

    Args:
        dtype: the instances' number format; full weights are sent in it.
        buffer_bytes: memory through which full weights pass.
    """

    def __init__(self, dtype: torch.dtype, buffer_bytes: int) -> None:
        self._dtype, self._buffer_bytes = dtype, buffer_bytes
        self._folder = memory_folder()
        self._numbers = itertools.count(1)
        self._outbox: Outbox | None = None
        self._adapters: list[Adapter] = []

    def name_of(self, version: int) -> str:
        """What instances call the weights of this sender; no other sender uses the name."""
        return f"{self._folder.name}.{version}"

    def version_of(self, name: str) -> int | None:
        """The version behind a name of `name_of`; None for weights that came from elsewhere."""
        sender, _, version = name.rpartition(".")
        return int(version) if sender == self._folder.name and version.isdecimal() else None

    def forget_connections(self) -> None:
        """Tell every instance anew, next time, where weights come from."""
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None

    def close(self) -> None:
        """Free the memory."""
        self.forget_connections()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def full(self, instances: Sequence[Instance], weights: PolicyWeights, where: str, pause: PauseMode) -> str:
        """Send all parameters. The instances are paused when this returns, and hold nothing cached.

        Returns:
            the fingerprint, which every worker has confirmed.

        Raises:
            DeliveryError: an instance holds something else.
        """
        if self._outbox is None:
            path = self._folder / f"weights-{next(self._numbers)}"
            self._outbox = Outbox(path, self._buffer_bytes)
            await each(instances, lambda i: i.connect_transfer({"path": str(path)}))
        await each(instances, lambda i: i.pause(pause))
        digest = Digest()
        try:
            await each(instances, _start_update)
            for slices in self._outbox.fill(weights.parameters() if weights.parameters else (), digest, self._dtype):
                await each(instances, lambda i, s=slices: i.update(s))  # type: ignore[misc]
        except BaseException:  # an instance left in the middle of an update would refuse every later one
            with suppress(Exception):
                async with asyncio.timeout(_FINISH_S):
                    await each(instances, lambda i: i.finish_update())
            raise
        await each(instances, lambda i: i.finish_update())
        sent = _as_announced(weights, digest.hexdigest(), where)
        await _prove(instances, self.name_of(weights.version), sent, where, "rlhf_fingerprint")
        if not all(await each(instances, lambda i: i.drop_cache())):
            raise DeliveryError("vLLM kept keys and values of older weights", where=where)
        return sent

    async def adapter(self, instances: Sequence[Instance], weights: PolicyWeights, where: str) -> tuple[str, Adapter]:
        """Load an adapter beside those in use, under a name that was never used before.

        Returns:
            its fingerprint, which every worker has confirmed, and the adapter.

        Raises:
            DeliveryError: an instance holds something else.
        """
        number = next(self._numbers)
        name = f"{self.name_of(weights.version)}-{number}"
        # vLLM knows an adapter by its number and never reloads one it knows: other senders must have others.
        adapter = Adapter(name, 1 + stable_seed(name) % (2**31 - 1), self._folder / f"adapter-{number}")
        digest, tensors = Digest(), {}
        for name, value in sorted(weights.parameters() if weights.parameters else ()):
            tensors[name] = value.detach().cpu().contiguous()
            digest.add(name, tensors[name])
        self._adapters.append(adapter)
        adapter.path.mkdir()
        save_file(tensors, str(adapter.path / "adapter_model.safetensors"))
        (adapter.path / "adapter_config.json").write_text(json.dumps(dict(weights.adapter or {})))
        await each(instances, lambda i: i.add_adapter(adapter))
        sent = _as_announced(weights, digest.hexdigest(), where)
        await _prove(
            instances, self.name_of(weights.version), sent, where, "rlhf_adapter_fingerprint", str(adapter.path)
        )
        if len(instances) > 1:
            await self._compare_bases(instances, adapter, where)
        return sent, adapter

    async def _compare_bases(self, instances: Sequence[Instance], adapter: Adapter, where: str) -> None:
        """Raise DeliveryError unless all instances sample alike: the base under an adapter has no fingerprint here."""
        greedy = SamplingParams(max_tokens=1, temperature=0.0)

        async def probabilities(instance: Instance) -> list[float]:
            calls = [
                instance.sample(f"{adapter.name}-base-{n}", range(8 * n, 8 * n + 8), greedy, (), adapter)
                for n in range(_N_COMPARED)
            ]
            return [found.logprobs[0] for found in await asyncio.gather(*calls)]

        first, *others = await each(instances, probabilities)
        for instance, found in zip(instances[1:], others, strict=True):
            gap = max(abs(a - b) for a, b in zip(first, found, strict=True))
            if gap > (1e-3 if self._dtype is torch.float32 else 0.25):
                raise DeliveryError(
                    "two servers sample differently with the same adapter: they have different bases",
                    where=f"{where}, {instances[0].name} and {instance.name}",
                    got=f"log-probs that differ by {gap:.2g} nats",
                    hint="serve the same model everywhere: rlhf serve RECIPE",
                )

    async def remove(self, instances: Sequence[Instance], adapter: Adapter) -> None:
        """Free an adapter that nobody uses."""
        await each(instances, lambda i: i.remove_adapter(adapter))
        self._adapters.remove(adapter)
        shutil.rmtree(adapter.path, ignore_errors=True)

    async def withdraw(self, instances: Sequence[Instance]) -> None:
        """Free all adapters on instances that may go on without this sender, as far as they still listen."""
        with suppress(Exception):
            async with asyncio.timeout(_FINISH_S):
                for adapter in tuple(self._adapters):
                    await self.remove(instances, adapter)


def _as_announced(weights: PolicyWeights, sent: str, where: str) -> str:
    if weights.fingerprint and weights.fingerprint != sent:
        raise DeliveryError(
            "the parameters sent are not those that were announced: the trainer's copy is stale, or changed meanwhile",
            where=where,
            got=sent,
            expected=weights.fingerprint,
        )
    return sent


async def _start_update(instance: Instance) -> None:
    """Begin an update; one that an earlier sender left in the middle is ended first."""
    try:
        await instance.start_update()
    except InstanceDownError:
        raise
    except EngineError:
        await instance.finish_update()
        await instance.start_update()


async def _prove(instances: Sequence[Instance], name: str, sent: str, where: str, method: str, *args: Any) -> None:
    """Compare what every worker received with what was sent; name the weights, and read the name back."""
    received = await each(instances, lambda i: i.call(method, *args))
    for instance, found in zip(instances, received, strict=True):
        if not found or any(worker != sent for worker in found):
            raise DeliveryError(
                "the engine holds other parameters than those that were sent: the engine is stale",
                where=f"{where}, {instance.name}",
                got=", ".join(map(str, found)),
                expected=sent,
            )
    await each(instances, lambda i: i.set_version(name))
    for instance, their_name in zip(instances, await each(instances, lambda i: i.version()), strict=True):
        if their_name != name:
            raise DeliveryError(
                "the engine calls its weights another version: the engine is stale",
                where=f"{where}, {instance.name}",
                got=their_name,
                expected=name,
            )


def delivery_error(error: BaseException, where: str, timeout_s: float) -> BaseException:
    """What a delivery raises that ended in `error`."""
    if isinstance(error, TimeoutError):
        return DeliveryError(
            "the delivery took too long",
            where=where,
            got=f"more than {timeout_s:g} s",
            hint="raise engine.delivery_timeout_s; with at_update drain it includes running generations",
        )
    if isinstance(error, DeliveryError) or not isinstance(error, Exception):
        return error
    got = str(error) if isinstance(error, RlhfError) else f"{type(error).__name__}: {error}"
    hint = "weights pass through memory (/dev/shm): free some, or lower engine.buffer_mb"
    return DeliveryError("the delivery failed", where=where, got=got, hint=hint * isinstance(error, OSError))


async def each(instances: Sequence[Instance], do: Callable[[Instance], Awaitable[T]]) -> list[T]:
    """`do` for all instances at once; raises the first error, once all have ended."""
    results = await asyncio.gather(*(do(instance) for instance in instances), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
