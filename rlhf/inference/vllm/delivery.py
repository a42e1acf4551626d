"""Weights to vLLM instances, and the proof that they arrived.

An instance that sees this machine's memory loads weights from there; to any other they are sent. The sender's digest is
taken of every tensor as it is sent, the receiver's of every tensor as it is loaded; then the instance is told the
version, and asked for it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from rlhf.data import PolicyWeights, SamplingParams
from rlhf.data.weights import ParameterIterator
from rlhf.errors import DeliveryError, EngineError, RlhfError
from rlhf.inference.adapter_files import MAX_BYTES
from rlhf.inference.fingerprint import Digest
from rlhf.inference.seeds import stable_seed
from rlhf.inference.transfer import PIECE_BYTES, BucketedSender, SharedMemorySender, Slice, memory_folder, write_token
from rlhf.inference.transfer_cuda import DeviceSender, gpu_of
from rlhf.inference.transfer_group import GroupSender
from rlhf.inference.vllm import broadcast
from rlhf.inference.vllm.instance import Adapter, Instance, InstanceDownError, NoInstanceError, PauseMode
from rlhf.inference.vllm.receivers import Receivers
from rlhf.inference.vllm.routes import Placement, Route, Way, route

AtUpdate = Literal["drain", "keep", "abort_and_resume"]

#: How instances pause while weights arrive.
PAUSE: dict[AtUpdate, PauseMode] = {"drain": "wait", "keep": "keep", "abort_and_resume": "abort"}

#: Seconds that instances have to leave an update that failed, and to free adapters at the end.
_FINISH_S = 2.0

#: Times that a piece is sent while its connection breaks, and seconds between them.
_MAX_BREAKS, _RETRY_S = 5, 0.05

#: Names of an adapter's files.
_TENSORS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"

#: Prompts on which servers are compared.
_N_COMPARED = 8


class Deliverer:
    """Sends weights through memory that sender and instances share, or in messages.

    Args:
        dtype: the instances' number format; full weights are sent in it.
        buffer_bytes: memory through which full weights pass.
        way: see `register_instance`.

    Attributes:
        sender: in the names of the weights; another's where this process does not deliver itself.
    """

    def __init__(self, dtype: torch.dtype, buffer_bytes: int, way: Way = "auto") -> None:
        self._dtype, self._buffer_bytes, self._way = dtype, buffer_bytes, way
        self._folder = memory_folder()
        self._token = write_token(self._folder / "token")
        self.sender = self._folder.name
        self._routes: dict[Instance, Route] = {}
        self._placements: dict[Instance, Placement] = {}
        self._group: list[Instance] = []
        self._is_coarse = False  # whether a GPU rounds what is of float32
        self._numbers = itertools.count(1)
        self._open_sender: BucketedSender | None = None
        self._adapters: list[Adapter] = []

    @property
    def token(self) -> str:
        """Path of the file that `describe` asks an instance for."""
        return str(self._folder / "token")

    def register_instance(self, instance: Instance, token: str, gpus: Sequence[str] = ("",)) -> None:
        """Choose how an instance is delivered to.

        Args:
            instance: to be delivered to.
            token: it found in this sender's folder.
            gpus: of its workers; empty for one without.

        Raises:
            EngineError: not in the way that was asked for.
        """
        placement = Placement(instance.name, token == self._token, gpus, gpu_of(), str(self._folder))
        self._placements[instance], self._routes[instance] = placement, route(self._way, placement)
        self._is_coarse |= any(gpus)

    def name_of(self, version: int) -> str:
        """Name of these weights on instances, unique to this sender."""
        return f"{self.sender}.{version}"

    def version_of(self, name: str) -> int | None:
        """The version behind a name of `name_of`; None for weights that came from elsewhere."""
        sender, _, version = name.rpartition(".")
        return int(version) if sender == self.sender and version.isdecimal() else None

    def forget_connections(self) -> None:
        """Tell every instance anew, next time, where weights come from."""
        if self._open_sender is not None:
            self._open_sender.close()
            self._open_sender, self._group = None, []

    def close(self) -> None:
        """Free the memory."""
        self.forget_connections()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def full(self, to: Receivers, weights: PolicyWeights, where: str, pause: PauseMode) -> str:
        """Send all parameters. The instances are paused when this returns, and hold nothing cached.

        Returns:
            the fingerprint, which every worker has confirmed.

        Raises:
            DeliveryError: an instance holds something else.
        """
        if self._group and self._group != to.instances:  # one that is gone would be waited for
            self.forget_connections()
        sender = self._open_sender = self._open_sender or await self._connected(to)
        await to.each(lambda i: i.pause(pause))
        digest = Digest()
        try:
            await to.each(_start_update)
            walk = weights.parameters() if weights.parameters else ()
            for slices in sender.fill(walk, digest, self._dtype):
                await self._send(to, sender, slices)
        except BaseException:  # an instance left in the middle of an update would refuse every later one
            if self._group:
                self.forget_connections()  # lets go of whoever waits for a broadcast
            with suppress(Exception):
                async with asyncio.timeout(_FINISH_S):
                    await asyncio.gather(*(i.finish_update() for i in to.instances), return_exceptions=True)
            raise
        await to.each(lambda i: i.finish_update())
        sent = _as_announced(weights, digest.hexdigest(), where)
        await _verify_fingerprints(to, self.name_of(weights.version), sent, where, lambda i: i.call("rlhf_fingerprint"))
        if not all(await to.each(lambda i: i.drop_cache())):
            raise DeliveryError("vLLM kept a KV cache of older weights", where=where)
        return sent

    async def _connected(self, to: Receivers) -> BucketedSender:
        """A buffer that every instance knows, where it is or that it comes in messages."""
        if self._all(to, "cuda_ipc"):
            await to.each(lambda i: i.connect_transfer({"path": "", "on_gpu": True}))
            return DeviceSender(self._buffer_bytes)
        if self._all(to, "broadcast"):
            sender = await broadcast.formed(
                to, {i: len(self._placements[i].gpus) for i in to.instances}, self._buffer_bytes
            )
            self._group = list(to.instances)
            return sender
        path = self._folder / f"weights-{next(self._numbers)}"
        file = SharedMemorySender(path, self._buffer_bytes)
        try:
            await to.each(lambda i: i.connect_transfer({"path": "" if self._is_far(i) else str(path)}))
        except BaseException:
            file.close()
            raise
        return file

    def _all(self, to: Receivers, one: Route) -> bool:
        return all(self._routes[i] == one for i in to.instances)

    def _is_far(self, instance: Instance) -> bool:
        return self._routes[instance] == "http" or not self._placements[instance].sees_memory

    async def _send(self, to: Receivers, sender: BucketedSender, slices: Sequence[Slice]) -> None:
        """Let every instance load what lies in the buffer."""
        if isinstance(sender, GroupSender):
            await broadcast.send(sender, to, slices)
            return
        if isinstance(sender, SharedMemorySender) and any(map(self._is_far, to.instances)):
            for place, piece in sender.pieces(slices):
                await self._put(to, place, b64encode(piece))
        await to.each(lambda i: i.update(slices, sender.address()))

    async def _put(self, to: Receivers, place: int, data: bytes) -> None:
        async def put(instance: Instance) -> None:
            if self._is_far(instance):
                await _retry_on_disconnect(instance, lambda: instance.put(place, data))

        await to.each(put)

    async def adapters(self, to: Receivers, weights: PolicyWeights, where: str) -> tuple[str, dict[str, Adapter]]:
        """Load the adapters of a version beside those in use, under names that were never used before.

        Returns:
            their fingerprint, which every worker has confirmed, and the adapters by role, the shared one by no name.

        Raises:
            DeliveryError: an instance holds something else.
        """
        found, sent = {}, []
        for role, walk in {"": weights.parameters, **weights.roles}.items():
            digest, found[role] = await self._adapter(to, weights, walk, f"{where}{role and f', adapter {role}'}")
            sent.append(digest)
        if len(to.instances) > 1:
            await self._compare_bases(to, found[""], where)
        return _as_announced(weights, "+".join(sent), where), found

    async def _adapter(
        self, to: Receivers, weights: PolicyWeights, walk: ParameterIterator | None, where: str
    ) -> tuple[str, Adapter]:
        """Load one adapter; its fingerprint, and the adapter."""
        number = next(self._numbers)
        name = f"{self.name_of(weights.version)}-{number}"
        # vLLM knows an adapter by its number and never reloads one it knows: other senders must have others.
        adapter = Adapter(name, 1 + stable_seed(name) % (2**31 - 1), self._folder / f"adapter-{number}")
        self._adapters.append(adapter)
        sent = _write(adapter.path, walk, weights.adapter or {})
        paths = {}

        async def add(instance: Instance) -> None:
            paths[instance] = await _sent(instance, adapter) if self._is_far(instance) else adapter.path
            await instance.add_adapter(replace(adapter, path=paths[instance]))

        await to.each(add)
        called = self.name_of(weights.version)
        await _verify_fingerprints(to, called, sent, where, lambda i: i.call("rlhf_adapter_fingerprint", str(paths[i])))
        return sent, adapter

    async def _compare_bases(self, to: Receivers, adapter: Adapter, where: str) -> None:
        """Raise DeliveryError unless all instances sample alike: the base under an adapter has no fingerprint here."""
        greedy = SamplingParams(max_tokens=1, temperature=0.0)

        async def probabilities(instance: Instance) -> list[float]:
            calls = [
                instance.sample(f"{adapter.name}-base-{n}", range(8 * n, 8 * n + 8), greedy, (), adapter)
                for n in range(_N_COMPARED)
            ]
            return [found.logprobs[0] for found in await asyncio.gather(*calls)]

        first, *others = await to.each(probabilities)
        for instance, found in zip(to.instances[1:], others, strict=True):
            gap = max(abs(a - b) for a, b in zip(first, found, strict=True))
            if gap > (0.25 if self._dtype is not torch.float32 else 0.02 if self._is_coarse else 1e-3):
                raise DeliveryError(
                    "two servers sample differently with the same adapter: they have different bases",
                    where=f"{where}, {to.instances[0].name} and {instance.name}",
                    got=f"log-probs that differ by {gap:.2g} nats",
                    hint="serve the same model everywhere: rlhf serve RECIPE",
                )

    async def remove(self, to: Receivers, adapter: Adapter) -> None:
        """Free an unused adapter."""

        async def remove(instance: Instance) -> None:
            await instance.remove_adapter(adapter)
            if self._is_far(instance):
                await instance.call("rlhf_remove_adapter", adapter.name)

        await to.each(remove)
        self._adapters.remove(adapter)
        shutil.rmtree(adapter.path, ignore_errors=True)

    async def withdraw(self, to: Receivers) -> None:
        """Unload this sender's adapters on instances that may outlive it, where they still answer."""
        with suppress(Exception):
            async with asyncio.timeout(_FINISH_S):
                for adapter in tuple(self._adapters):
                    await self.remove(to, adapter)


def _write(folder: Path, walk: ParameterIterator | None, settings: Mapping[str, Any]) -> str:
    """Write an adapter as PEFT does; its fingerprint."""
    digest, tensors = Digest(), {}
    for name, value in sorted(walk() if walk else ()):
        tensors[name] = value.detach().cpu().contiguous()
        digest.add(name, tensors[name])
    folder.mkdir()
    save_file(tensors, str(folder / _TENSORS))
    (folder / _CONFIG).write_text(json.dumps(dict(settings)))
    return digest.hexdigest()


async def _sent(instance: Instance, adapter: Adapter) -> Path:
    """Send an adapter's files; the folder in which the instance has them."""
    n_bytes = (adapter.path / _TENSORS).stat().st_size
    if n_bytes > MAX_BYTES:
        raise EngineError(
            "the adapter is too large to be sent",
            where=instance.name,
            got=f"{n_bytes} bytes",
            expected=f"at most {MAX_BYTES}",
            hint="set engine.lora: merged, which sends full weights",
        )
    folders = set(await instance.call("rlhf_open_adapter", adapter.name, (adapter.path / _CONFIG).read_text()))
    if len(folders) != 1:
        got = ", ".join(sorted(map(str, folders))) or "none"
        raise EngineError("the server's processes put the adapter into different folders", where=instance.name, got=got)
    with (adapter.path / _TENSORS).open("rb") as file:
        for place in range(0, n_bytes, PIECE_BYTES):
            data = b64encode(file.read(PIECE_BYTES)).decode()
            await _retry_on_disconnect(
                instance, partial(instance.call, "rlhf_write_adapter", adapter.name, place, data)
            )
    return Path(str(folders.pop()))


async def _retry_on_disconnect(instance: Instance, do: Callable[[], Awaitable[Any]]) -> None:
    """Do again what may be done twice, where the connection broke and the instance is still there."""
    for n_left in reversed(range(_MAX_BREAKS)):
        try:
            await do()
            return
        except InstanceDownError:
            if not n_left or not await instance.is_up():
                raise
            await asyncio.sleep(_RETRY_S)


def _as_announced(weights: PolicyWeights, sent: str, where: str) -> str:
    if weights.fingerprint and weights.fingerprint != sent:
        raise DeliveryError(
            "the sent parameters differ from the announced ones: the trainer's copy is stale, or changed meanwhile",
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


async def _verify_fingerprints(
    to: Receivers, name: str, sent: str, where: str, fingerprints: Callable[[Instance], Awaitable[list[Any]]]
) -> None:
    """Compare what every worker received with what was sent; name the weights, and read the name back."""
    received = await to.each(fingerprints)
    for instance, found in zip(to.instances, received, strict=True):
        if not found or any(worker != sent for worker in found):
            raise DeliveryError(
                "the engine's parameters differ from the sent ones: the engine is stale",
                where=f"{where}, {instance.name}",
                got=", ".join(map(str, found)),
                expected=sent,
            )
    await to.each(lambda i: i.set_version(name))
    names = await to.each(lambda i: i.version())
    for instance, their_name in zip(to.instances, names, strict=True):
        if their_name != name:
            raise DeliveryError(
                "the engine reports another version of its weights: the engine is stale",
                where=f"{where}, {instance.name}",
                got=their_name,
                expected=name,
            )


def delivery_error(error: BaseException, where: str, timeout_s: float) -> BaseException:
    """Error that a failed delivery raises, from its cause `error`."""
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
    kind = NoInstanceError if isinstance(error, InstanceDownError) else DeliveryError  # the last one has ended
    return kind("the delivery failed", where=where, got=got, hint=hint * isinstance(error, OSError))
