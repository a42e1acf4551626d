"""vLLM rollout engine: an instance in its own process, or several servers, behind one protocol.

vLLM batches whatever calls are open, so every episode goes at its own pace. Calls of one session stay on the instance
that holds the session's prefix; a new session goes to the instance with the fewest running calls. An instance that dies
loses its calls to another; a call is never answered twice, nor by weights other than its generation says.

Weights arrive in `load`: in full, or as an adapter beside the one in use; through memory that an instance shares with
this process, or in messages. Whichever way, the fingerprint of what was sent is compared with the fingerprint of what
every worker received, and with the version that the instance then reports.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from rlhf.data import Finish, Generation, PolicyWeights, Prompt, SamplingParams, WeightsForm
from rlhf.errors import DeliveryError, EngineError
from rlhf.inference.engine import check_prompt
from rlhf.inference.vllm.call import GenerationRequest
from rlhf.inference.vllm.delivery import PAUSE, AtUpdate, Deliverer, delivery_error
from rlhf.inference.vllm.instance import (
    Adapter,
    Instance,
    InstanceDownError,
    InstanceStaleError,
    NoInstanceError,
    Sampled,
)
from rlhf.inference.vllm.receivers import Receivers
from rlhf.inference.vllm.replica_set import Replica, ReplicaSet, listed
from rlhf.inference.vllm.routes import Way

#: Times a call is taken up again after something other than an update ended it.
_MAX_ABORTS = 3

#: Times the connection of a call may break while the instance is up.
_MAX_BREAKS = 5

#: Seconds between two looks at whether running calls have ended.
_DRAIN_POLL_S = 0.005

#: Seconds until a call whose connection broke is made again.
_RETRY_S = 0.05

#: Seconds in which an instance hands back what an aborted request has sampled; after that it is forgotten. It is asked
#: so many times meanwhile, as vLLM ends no request that is still on its way to it.
_ABORT_S, _MAX_ASKED = 1.0, 20


class VllmEngine:
    """A `RolloutEngine` over running vLLM instances. All calls come from one event loop.

    Args:
        instances: at least one; `connect` checks them.
        form: how weights are delivered: "full", or "adapter" beside a frozen base.
        dtype: the instances' number format, which full weights are sent in.
        at_update: what becomes of running generations when weights arrive. `drain` lets them finish first; `keep`
            continues them with the new weights, keys and values computed anew (with an adapter: they finish with the
            one they began with); `abort_and_resume` ends them, keeps what they have, and continues after the update.
        request_timeout_s: most seconds for one call.
        delivery_timeout_s: most seconds for one delivery.
        buffer_bytes: memory through which full weights pass.
        delivery: whether they pass through memory that both sides share, and which, or are sent.
        sleeps: whether `rest` gives the GPU's memory back.
        return_s: most seconds that a delivery waits for instances that are started again, where all are lost.
        roster: file with addresses, one a line, of servers that take part beside the instances from a delivery on.
    """

    #: The engine has a copy of the weights, and kernels of its own.
    shares_policy: ClassVar[bool] = False

    def __init__(
        self,
        instances: Sequence[Instance],
        *,
        form: WeightsForm = "full",
        dtype: torch.dtype = torch.float32,
        at_update: AtUpdate = "drain",
        request_timeout_s: float = 600.0,
        delivery_timeout_s: float = 300.0,
        buffer_bytes: int = 256 * 2**20,
        delivery: Way = "auto",
        sleeps: bool = False,
        version: int = 0,
        return_s: float = 0.0,
        roster: Path | None = None,
    ) -> None:
        self._deliverer = Deliverer(dtype, buffer_bytes, delivery)
        self._replicas = ReplicaSet(instances, self._deliverer, delivery_timeout_s)
        self.weights_form, self._at_update = form, at_update
        self._request_timeout_s, self._delivery_timeout_s = request_timeout_s, delivery_timeout_s
        self.policy_version, self.policy_fingerprint = version, ""
        self.max_context = self._n_vocab = 0
        self._calls: dict[str, set[GenerationRequest]] = {}
        # Other processes ask the same servers: a name must be no other's, as objects' ids in twin processes are.
        self._numbers, self._name = itertools.count(1), uuid.uuid4().hex
        self._open, self._delivering = asyncio.Event(), asyncio.Lock()
        self._open.set()
        self._n_updates, self._return_s, self._roster = 0, return_s, roster
        self._max_aborts: float = _MAX_ABORTS
        self._broken = ""
        self._sleeps, self._is_asleep = sleeps, False
        self._adapters: Mapping[str, Adapter] = {}
        self._users: dict[str, int] = {}
        self._retired: list[Adapter] = []

    @property
    def sender(self) -> str:
        """Prefix of the names of weights that it has delivered, or follows."""
        return self._deliverer.sender

    @property
    def joined(self) -> tuple[str, ...]:
        """Addresses of the roster that take part."""
        return self._replicas.joined

    async def needs_weights(self) -> bool:
        """Return whether none of the instances has the weights of the last delivery any more."""
        async with self._delivering:
            try:
                await self._replicas.check_health(
                    is_delivered=bool(self.policy_fingerprint), limit_s=self._delivery_timeout_s
                )
            except TimeoutError:
                return True  # the delivery that follows names who hangs
            return not self._replicas.in_use

    async def connect(
        self,
        *,
        shapes: Mapping[str, Any],
        n_vocab: int,
        max_context: int,
        lora_rank: int = 0,
        leaves_out: bool = False,
    ) -> None:
        """Refuse instances that do not fit the policy, and learn what they can do.

        Args:
            shapes: of the policy's configuration, by name; every one an instance has must be the same.
            n_vocab: ids the policy knows.
            max_context: wished for; the least of all instances holds.
            lora_rank: of the adapters that will come.
            leaves_out: whether instances that do not answer are out of use until they do, instead of an error.

        Raises:
            EngineError: an instance does not answer, has another model, or lacks what is needed.
        """
        self._n_vocab = n_vocab
        found = await self._replicas.connect(shapes, n_vocab, lora_rank, leaves_out=leaves_out)
        self.max_context = min(max_context, found or max_context)
        if self.max_context < max_context:
            warnings.warn(
                f"a server has a context of {found} tokens: episodes are cut there, not at {max_context} as the recipe "
                f"and the model have it; start it with a longer context, or set limits.max_context={found}",
                stacklevel=2,
            )

    async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
        """Sample once.

        Raises:
            ContextFull: the prompt leaves no room for a token.
            EngineError: the engine is closed or holds half an update, no instance is left, the call took too long, or
                vLLM failed.
        """
        where = "VllmEngine.generate"
        if self._is_asleep:
            async with self._delivering:
                await self._wake()
        if self._broken:
            raise EngineError(self._broken, where=where)
        room = check_prompt(prompt, where, max_context=self.max_context, n_vocab=self._n_vocab)
        call = GenerationRequest(prompt, replace(params, max_tokens=min(params.max_tokens, room)), session)
        mine = self._calls.setdefault(session, set())
        mine.add(call)
        try:
            async with asyncio.timeout(self._request_timeout_s):
                return await self._finished(call)
        except TimeoutError:
            raise EngineError(
                "the engine did not answer in time",
                where=f"VllmEngine, session {session!r}",
                got=f"{len(call.token_ids)} tokens in {self._request_timeout_s:g} s",
                hint="raise engine.request_timeout_s, or lower limits.max_tokens",
            ) from None
        finally:
            mine.discard(call)
            if not mine:
                self._calls.pop(session, None)

    async def release(self, session: str) -> None:
        """Forget where a session lives. What it still runs returns at once, with `Finish.ABORT`."""
        self._replicas.leave(session)
        calls = tuple(self._calls.get(session, ()))
        for call in calls:
            call.withdrawn = True
        try:
            for _ in range(_MAX_ASKED):
                tasks = []
                for replica in self._replicas.all:
                    if mine := [call for call in calls if call.request_id in replica.running]:
                        with suppress(InstanceDownError):  # it runs nothing any more
                            await replica.instance.abort([call.request_id for call in mine])
                        tasks += [call.task for call in mine if call.task]
                if not tasks:
                    break
                await asyncio.wait(tasks, timeout=_ABORT_S / _MAX_ASKED)
        finally:
            for call in calls:
                call.end()

    async def load(self, weights: PolicyWeights) -> None:
        """Deliver `weights` to every instance, and prove that each holds them.

        An instance that was lost is taken back if it answers again.

        Raises:
            DeliveryError: the version goes back, what arrived is not what was sent, or it took too long. After a failed
                delivery the engine generates no more: nobody could say what it samples from.
        """
        where = f"VllmEngine.load, version {weights.version}"
        if weights.form != self.weights_form or weights.version < self.policy_version:
            wrong = weights.form != self.weights_form
            raise DeliveryError(
                f"this engine takes {self.weights_form} weights" if wrong else "weights are older than those in use",
                where=where,
                got=f"{weights.form} weights" if wrong else f"version {weights.version}",
                expected=f"{self.weights_form} weights" if wrong else f"at least {self.policy_version}",
            )
        async with self._delivering:
            try:
                is_delivered = bool(self.policy_fingerprint)
                if self._roster is not None:
                    await self._replicas.reconcile(listed(self._roster), self.max_context)
                await self._replicas.recover(
                    self.max_context,
                    is_delivered=is_delivered,
                    limit_s=self._delivery_timeout_s,
                    wait_s=self._return_s,
                )
                async with asyncio.timeout(self._delivery_timeout_s):
                    await self._wake()
                    fingerprint = await self._deliver(weights, where)
            except BaseException as error:
                self._halt(f"the delivery of version {weights.version} failed: {type(error).__name__}")
                told = delivery_error(error, where, self._delivery_timeout_s)
                if told is error:
                    raise
                raise told from error
            self.policy_fingerprint, self._broken = fingerprint, ""

    async def sleep(self) -> None:
        """Release the GPU's memory, if configured; the next `generate` or `load` takes it again."""
        async with self._delivering:
            if self._sleeps and not self._is_asleep and not self._broken:
                self._is_asleep = True
                await self._replicas.receivers().each(lambda i: i.sleep())

    async def _wake(self) -> None:
        if self._is_asleep:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # what this process keeps for later is what the engine needs now
            await self._replicas.receivers().each(lambda i: i.wake())
            self._is_asleep = False

    async def close(self) -> None:
        """Stop what was started, close connections, free memory. Running and later calls fail."""
        self._halt("the engine is closed")
        if running := [call.task for calls in self._calls.values() for call in calls if call.task]:
            await asyncio.wait(running, timeout=_ABORT_S)
        await self._deliverer.withdraw(self._replicas.receivers())
        for replica in self._replicas.all:
            await replica.instance.close()
        self._deliverer.close()

    def _halt(self, why: str) -> None:
        """Generate no more, and end what runs."""
        self._broken = why
        self._open.set()
        for calls in self._calls.values():
            for call in calls:
                call.end()

    async def _finished(self, call: GenerationRequest) -> Generation:
        """The answer to a call that `release`, `close` and a failed delivery can end."""
        call.task = asyncio.create_task(self._answer(call))
        try:
            return await call.task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            if call.withdrawn:
                return call.generation(Finish.ABORT, self.policy_version)
            raise EngineError(self._broken, where="VllmEngine.generate") from None

    async def _answer(self, call: GenerationRequest) -> Generation:
        n_aborts = n_breaks = 0
        while True:
            await self._open.wait()
            if self._broken:
                raise EngineError(self._broken, where="VllmEngine.generate")
            n_updates = self._n_updates
            replica = self._replicas.of(call.session)
            try:
                sampled = await self._ask(replica, call)
            except InstanceDownError as error:  # `of` finds another, or says that there is none
                n_breaks += not replica.fault
                if n_breaks > _MAX_BREAKS:
                    raise EngineError("the connection broke repeatedly", where=error.where, got=error.got) from error
                await asyncio.sleep(_RETRY_S)
                continue
            if sampled.finish is not Finish.ABORT or call.withdrawn:
                return call.generation(sampled.finish, self.policy_version)
            call.rewind()
            # While weights arrive, and where they arrived meanwhile, it was the update that ended it.
            n_aborts += self._open.is_set() and self._n_updates == n_updates
            if n_aborts > self._max_aborts:
                raise EngineError("vLLM aborted the call", where="VllmEngine.generate", got=f"{n_aborts} times")

    async def _ask(self, replica: Replica, call: GenerationRequest) -> Sampled:
        call.request_id = f"{self._name}-{next(self._numbers)}"
        version, is_delivered = self.policy_version, bool(self.policy_fingerprint)
        adapter = self._adapter_of(call.prompt)
        replica.running.add(call.request_id)
        self._use(adapter, +1)
        try:
            ids = call.prompt.token_ids + call.token_ids
            sampled = await replica.instance.sample(call.request_id, ids, call.rest(), call.prompt.stop_ids, adapter)
            versions = [self._deliverer.version_of(name) for name, _ in sampled.spans]
            if is_delivered and None in versions:
                got = ", ".join(name for name, _ in sampled.spans)
                raise InstanceStaleError(
                    "the server has different weights by now", where=replica.instance.name, got=got
                )
        except InstanceDownError as error:
            await self._replicas.lose(replica, error)
            raise
        finally:
            replica.running.discard(call.request_id)
            self._use(adapter, -1)
        if adapter is not None or not versions:  # an adapter stays the one that the call began with
            call.take(sampled, [(version, len(sampled.token_ids))])
        else:
            counts = [n for _, n in sampled.spans]
            call.take(sampled, [(version if v is None else v, n) for v, n in zip(versions, counts, strict=True)])
        return sampled

    def _adapter_of(self, prompt: Prompt) -> Adapter | None:
        """The adapter that reads a prompt; None where full weights are delivered."""
        if prompt.adapter and prompt.adapter not in self._adapters:
            raise EngineError(
                "no adapter of this role was delivered",
                where="VllmEngine.generate",
                got=repr(prompt.adapter),
                expected=", ".join(map(repr, self._adapters)) or "a prompt for the shared weights",
            )
        return self._adapters.get(prompt.adapter)

    def _use(self, adapter: Adapter | None, by: int) -> None:
        if adapter is not None:
            self._users[adapter.name] = self._users.get(adapter.name, 0) + by

    async def _deliver(self, weights: PolicyWeights, where: str) -> str:
        to = self._replicas.receivers()
        if not to.instances:
            raise NoInstanceError("no vLLM instance is left to deliver to", where=where, got=self._replicas.faults)
        if self.weights_form == "adapter":
            return await self._deliver_adapter(weights, to, where)
        self._open.clear()  # new calls wait from now on
        sent = await self._deliverer.full(to, weights, where, PAUSE[self._at_update])
        self._begin(weights.version)
        await to.each(lambda i: i.resume())
        return sent

    async def _deliver_adapter(self, weights: PolicyWeights, to: Receivers, where: str) -> str:
        sent, adapters = await self._deliverer.adapters(to, weights, where)
        if self._at_update == "drain":
            self._open.clear()
            while any(replica.running for replica in self._replicas.all):
                await asyncio.sleep(_DRAIN_POLL_S)
        old, self._adapters = self._adapters, adapters
        self._begin(weights.version)
        if self._at_update == "abort_and_resume":
            running = [(replica.instance, sorted(replica.running)) for replica in self._replicas.all if replica.running]
            await asyncio.gather(*(instance.abort(ids) for instance, ids in running))
        self._retired += old.values()
        for unused in [a for a in self._retired if not self._users.get(a.name)]:
            await self._deliverer.remove(to, unused)
            self._retired.remove(unused)
        return sent

    def _begin(self, version: int) -> None:
        """New calls use `version`."""
        self.policy_version = version
        self._n_updates += 1
        self._open.set()
