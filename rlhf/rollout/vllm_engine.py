"""The vLLM rollout engine: one instance in a process of its own, or several servers, behind the same protocol.

vLLM batches whatever calls are open, so every episode goes at its own pace. Calls of one session stay on the instance
that holds the session's prefix; a new session goes to the instance with the fewest running calls. An instance that dies
loses its calls to another; a call is never answered twice, nor by weights other than its generation says.

Weights arrive in `load`: in full through shared memory, or as an adapter beside the one in use. Both ways the
fingerprint of what was sent is compared with the fingerprint of what every worker received, and with the version that
the instance then reports.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from rlhf.data import Finish, Generation, PolicyWeights, Prompt, SamplingParams, WeightsForm
from rlhf.errors import ContextFull, DeliveryError, EngineError
from rlhf.rollout.seeds import stable_seed
from rlhf.rollout.vllm_delivery import Deliverer, check_fit, each
from rlhf.rollout.vllm_instance import Adapter, Instance, InstanceDownError, PauseMode, Sampled

AtUpdate = Literal["drain", "keep", "abort_and_resume"]

_PAUSE: dict[AtUpdate, PauseMode] = {"drain": "wait", "keep": "keep", "abort_and_resume": "abort"}

#: Times a call is taken up again after something other than an update ended it.
_MAX_ABORTS = 3

#: Seconds between two looks at whether running calls have ended.
_DRAIN_POLL_S = 0.005

#: Seconds until a call whose connection broke is made again.
_RETRY_S = 0.05


@dataclass(eq=False)
class _Seat:
    """An instance and what runs on it. `fault` says why it is out of use; empty while it is in use."""

    instance: Instance
    running: set[str] = field(default_factory=set)
    fault: str = ""


@dataclass(eq=False)
class _Call:
    """A call of `generate` with what it has sampled so far."""

    prompt: Prompt
    params: SamplingParams
    session: str
    withdrawn: bool = False
    request_id: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: list[tuple[int, int]] = field(default_factory=list)

    def rest(self) -> SamplingParams:
        """Parameters for what is left to sample; after an interruption with random numbers of its own."""
        if not self.token_ids:
            return self.params
        n = len(self.token_ids)
        return replace(self.params, max_tokens=self.params.max_tokens - n, seed=stable_seed(self.params.seed, n))

    def take(self, sampled: Sampled, versions: Sequence[tuple[int, int]]) -> None:
        """Add what an instance sampled."""
        self.token_ids += sampled.token_ids
        self.logprobs += sampled.logprobs
        for version, n in versions:
            if self.spans and self.spans[-1][0] == version:
                self.spans[-1] = (version, self.spans[-1][1] + n)
            elif n:
                self.spans.append((version, n))

    def generation(self, finish: Finish, version: int) -> Generation:
        """The answer."""
        first = self.spans[0][0] if self.spans else version
        spans = tuple(self.spans) if len(self.spans) > 1 else ()
        return Generation(self.prompt, self.token_ids, self.logprobs, finish, first, spans)


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
    """

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
        version: int = 0,
    ) -> None:
        self._seats = [_Seat(instance) for instance in instances]
        self._form, self._at_update = form, at_update
        self._request_timeout_s, self._delivery_timeout_s = request_timeout_s, delivery_timeout_s
        self._version, self._fingerprint = version, ""
        self._max_context = self._n_vocab = 0
        self._calls: dict[str, set[_Call]] = {}
        self._home: dict[str, _Seat] = {}
        self._numbers = itertools.count(1)
        self._open, self._delivering = asyncio.Event(), asyncio.Lock()
        self._open.set()
        self._n_updates = 0
        self._broken = ""
        self._closed = False
        self._deliverer = Deliverer(dtype, buffer_bytes)
        self._adapter: Adapter | None = None
        self._users: dict[str, int] = {}
        self._retired: list[Adapter] = []

    @property
    def policy_version(self) -> int:
        """Version of the weights that new calls use."""
        return self._version

    @property
    def policy_fingerprint(self) -> str:
        """Fingerprint of the last delivery, as every worker reported it; empty before."""
        return self._fingerprint

    @property
    def weights_form(self) -> WeightsForm:
        """How `load` takes weights."""
        return self._form

    @property
    def shares_policy(self) -> bool:
        """The engine has a copy of the weights, and kernels of its own."""
        return False

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and generation together."""
        return self._max_context

    @property
    def n_instances(self) -> int:
        """Instances in use."""
        return sum(not seat.fault for seat in self._seats)

    async def connect(self, *, shapes: Mapping[str, Any], n_vocab: int, max_context: int, lora_rank: int = 0) -> None:
        """Refuse instances that do not fit the policy, and learn what they can do.

        Args:
            shapes: of the policy's configuration, by name; every one an instance has must be the same.
            n_vocab: ids the policy knows.
            max_context: wished for; the least of all instances holds.
            lora_rank: of the adapters that will come.

        Raises:
            EngineError: an instance does not answer, has another model, or lacks what is needed.
        """
        found = [await self._described(seat) for seat in self._seats]
        for seat, is_ in zip(self._seats, found, strict=True):
            check_fit(seat.instance.name, is_, shapes, n_vocab, lora_rank)
        self._n_vocab = n_vocab
        self._max_context = min([max_context, *(int(is_["max_context"]) for is_ in found)])

    async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
        """Sample once.

        Raises:
            ContextFull: the prompt leaves no room for a token.
            EngineError: the engine is closed or holds half an update, no instance is left, the call took too long, or
                vLLM failed.
        """
        self._check(prompt)
        room = self._max_context - len(prompt.token_ids)
        call = _Call(prompt, replace(params, max_tokens=min(params.max_tokens, room)), session)
        mine = self._calls.setdefault(session, set())
        mine.add(call)
        try:
            async with asyncio.timeout(self._request_timeout_s):
                return await self._answer(call)
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
        self._home.pop(session, None)
        for call in tuple(self._calls.get(session, ())):
            call.withdrawn = True
            for seat in self._seats:
                if call.request_id in seat.running:
                    await seat.instance.abort([call.request_id])

    async def load(self, weights: PolicyWeights) -> None:
        """Deliver `weights` to every instance, and prove that each holds them.

        An instance that was lost is taken back if it answers again.

        Raises:
            DeliveryError: the version goes back, what arrived is not what was sent, or it took too long. After a failed
                delivery the engine generates no more: nobody could say what it samples from.
        """
        where = f"VllmEngine.load, version {weights.version}"
        if weights.form != self._form or weights.version < self._version:
            wrong = weights.form != self._form
            raise DeliveryError(
                f"this engine takes {self._form} weights" if wrong else "weights are older than those in use",
                where=where,
                got=f"{weights.form} weights" if wrong else f"version {weights.version}",
                expected=f"{self._form} weights" if wrong else f"at least {self._version}",
            )
        async with self._delivering:
            try:
                async with asyncio.timeout(self._delivery_timeout_s):
                    fingerprint = await self._deliver(weights, where)
            except BaseException as error:
                self._broken = f"the delivery of version {weights.version} failed: {type(error).__name__}"
                self._open.set()
                if isinstance(error, TimeoutError):
                    raise DeliveryError(
                        "the delivery took too long",
                        where=where,
                        got=f"more than {self._delivery_timeout_s:g} s",
                        hint="raise engine.delivery_timeout_s; with at_update drain it includes running generations",
                    ) from error
                if isinstance(error, EngineError) and not isinstance(error, DeliveryError):
                    raise DeliveryError("the delivery failed", where=where, got=str(error)) from error
                raise
            self._fingerprint, self._broken = fingerprint, ""

    async def close(self) -> None:
        """Stop what was started, close connections, free memory. Later calls fail."""
        self._closed = True
        self._open.set()
        for seat in self._seats:
            await seat.instance.close()
        self._deliverer.close()

    def _check(self, prompt: Prompt) -> None:
        ids, where = prompt.token_ids, "VllmEngine.generate"
        if self._closed or self._broken:
            raise EngineError("the engine is closed" if self._closed else self._broken, where=where)
        if len(ids) >= self._max_context:
            raise ContextFull(
                "the prompt leaves no room for a token",
                where=where,
                got=f"{len(ids)} tokens",
                expected=f"fewer than {self._max_context}",
            )
        if min(ids) < 0 or max(ids) >= self._n_vocab:
            raise EngineError(
                "a token id is outside the model's vocabulary",
                where=where,
                got=f"ids from {min(ids)} to {max(ids)}",
                expected=f"0 to {self._n_vocab - 1}",
                hint="use the tokenizer that belongs to the model",
            )

    async def _answer(self, call: _Call) -> Generation:
        n_aborts = 0
        while True:
            await self._open.wait()
            if self._closed or self._broken:
                raise EngineError("the engine is closed" if self._closed else self._broken, where="VllmEngine.generate")
            n_updates = self._n_updates
            try:
                sampled = await self._ask(self._seat_of(call.session), call)
            except InstanceDownError:  # `_seat_of` finds another, or says that there is none
                await asyncio.sleep(_RETRY_S)
                continue
            if sampled.finish is not Finish.ABORT or call.withdrawn:
                return call.generation(sampled.finish, self._version)
            n_aborts += self._n_updates == n_updates
            if n_aborts > _MAX_ABORTS:
                raise EngineError("vLLM gave the call up", where="VllmEngine.generate", got=f"{n_aborts} times")

    async def _ask(self, seat: _Seat, call: _Call) -> Sampled:
        call.request_id = f"{id(self):x}-{next(self._numbers)}"
        adapter, version = self._adapter, self._version
        seat.running.add(call.request_id)
        self._use(adapter, +1)
        try:
            ids = call.prompt.token_ids + call.token_ids
            sampled = await seat.instance.sample(call.request_id, ids, call.rest(), call.prompt.stop_ids, adapter)
        except InstanceDownError as error:
            await self._lose(seat, error)
            raise
        finally:
            seat.running.discard(call.request_id)
            self._use(adapter, -1)
        spans = [(_number(name, version), n) for name, n in sampled.spans] if adapter is None else []
        call.take(sampled, spans or [(version, len(sampled.token_ids))])
        return sampled

    def _seat_of(self, session: str) -> _Seat:
        """Where the session lives, else the least busy instance."""
        home = self._home.get(session)
        if home is not None and not home.fault:
            return home
        living = [seat for seat in self._seats if not seat.fault]
        if not living:
            raise EngineError(
                "no vLLM instance is left",
                where="VllmEngine.generate",
                got="; ".join(f"{seat.instance.name}: {seat.fault}" for seat in self._seats),
                hint="start the servers again; a delivery takes them back",
            )
        seat = min(living, key=lambda s: len(s.running))
        if session:
            self._home[session] = seat
        return seat

    async def _lose(self, seat: _Seat, error: EngineError) -> None:
        """Take an instance out of use, unless it still answers: then one connection broke."""
        if not seat.fault and not await seat.instance.is_up():
            seat.fault = f"{error.what}: {error.got}"

    def _use(self, adapter: Adapter | None, by: int) -> None:
        if adapter is not None:
            self._users[adapter.name] = self._users.get(adapter.name, 0) + by

    async def _deliver(self, weights: PolicyWeights, where: str) -> str:
        for seat in self._seats:
            if seat.fault and await seat.instance.is_up():
                seat.fault = ""
                self._deliverer.forget_connections()
        instances = [seat.instance for seat in self._seats if not seat.fault]
        if not instances:
            raise DeliveryError("no vLLM instance is left to deliver to", where=where)
        if self._form == "adapter":
            return await self._deliver_adapter(weights, instances, where)
        self._shut()
        sent = await self._deliverer.full(instances, weights, where, _PAUSE[self._at_update])
        self._begin(weights.version)
        await each(instances, lambda i: i.resume())
        return sent

    async def _deliver_adapter(self, weights: PolicyWeights, instances: list[Instance], where: str) -> str:
        sent, adapter = await self._deliverer.adapter(instances, weights, where)
        if self._at_update == "drain":
            self._shut()
            while any(seat.running for seat in self._seats):
                await asyncio.sleep(_DRAIN_POLL_S)
        old, self._adapter = self._adapter, adapter
        self._begin(weights.version)
        if self._at_update == "abort_and_resume":
            running = [(seat.instance, sorted(seat.running)) for seat in self._seats if seat.running]
            await asyncio.gather(*(instance.abort(ids) for instance, ids in running))
        self._retired += [old] if old is not None else []
        for unused in [a for a in self._retired if not self._users.get(a.name)]:
            await self._deliverer.remove(instances, unused)
            self._retired.remove(unused)
        return sent

    def _shut(self) -> None:
        """New calls wait from now on."""
        self._open.clear()

    def _begin(self, version: int) -> None:
        """New calls use `version`."""
        self._version = version
        self._n_updates += 1
        self._open.set()

    async def _described(self, seat: _Seat) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._delivery_timeout_s):
                found = await seat.instance.call("rlhf_describe")
        except TimeoutError:
            raise EngineError("the server did not answer in time", where=seat.instance.name) from None
        except InstanceDownError as error:
            hint = "start it with `rlhf serve`, or correct engine.servers"
            raise EngineError(error.what, where=error.where, got=error.got, hint=hint) from error
        if not found or not isinstance(found[0], dict):
            raise EngineError(
                "the server does not describe itself",
                where=seat.instance.name,
                got=repr(found)[:200],
                hint="start it with `rlhf serve`, or with --worker-extension-cls rlhf.rollout.vllm_worker.Worker",
            )
        return dict(found[0])


def _number(name: str, otherwise: int) -> int:
    """The version behind the name an instance gives its weights; before the first delivery it has one of its own."""
    return int(name) if name.isdecimal() else otherwise
