"""The embedded rollout engine: continuous batching over a transformers model that lives in this process.

Each step computes the newest token of every running request and the uncached part of every new prompt in one forward
pass without padding, samples, and lets the event loop run. A session keeps its keys and values between its calls, so a
turn costs its new tokens only; prompts that begin alike are computed once.

The module is the trainer's own: a step of the optimiser changes what the engine samples from, and `load` tells the
engine, which forgets its cache. It puts the module in eval mode to compute, the trainer back in train mode to train.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rlhf.data import Finish, Generation, PolicyWeights, Prompt, SamplingParams, WeightsForm
from rlhf.device import allocation_failure
from rlhf.errors import DeliveryError, EngineError
from rlhf.inference.embedded.attention import check_context, planned_forward, use_packed_attention
from rlhf.inference.embedded.kv_cache import KVCache, SlotPlan
from rlhf.inference.embedded.sampling import sample
from rlhf.inference.embedded.scheduler import Copy, EngineStats, Request, Segments, SlotTable, own_session
from rlhf.inference.engine import check_prompt
from rlhf.inference.fingerprint import fingerprint
from rlhf.inference.role_adapters import adapter_names, number_of

#: Rows of every matrix product are padded to a multiple of this: BLAS has kernels of their own for a few rows, and a
#: token's log-prob shall not depend, to the last bit, on how many other tokens are computed with it.
_ROW_STEP = 8

Ints = npt.NDArray[np.int64]


class TransformersEngine:
    """A `RolloutEngine` over a transformers causal LM, shared with the trainer. All calls come from one event loop.

    Args:
        model: causal LM, or a PEFT wrapper of one; it is switched to packed attention.
        max_context: most tokens of prompt and generation together.
        max_sessions: sessions whose keys and values are kept. With more than these alive, calls wait for a slot and the
            session idle for longest loses its cache; best at least the number of concurrent episodes.
        max_batch_tokens: most tokens of one forward pass; longer prompts are computed in pieces between the others'
            tokens. The event loop stands still during a pass, so a large model on a slow machine wants few.
        version: of the weights that the model holds now.
        decode: text of token ids, as the tokenizer's `decode`; needed for stop strings only.

    Attributes:
        policy_version: of the weights that new calls use.
        policy_fingerprint: found at the last `load`; empty before.
        max_context: most tokens of prompt and generation together.
        n_vocab: number of token ids that the model has embeddings of.
        stats: counters since it was made.
        options: it was made with, version aside, for another over the same module.

    Raises:
        ModelError: the model cannot run packed, or was not made for `max_context` positions.
    """

    #: Log-probs are computed by the trainer's own module.
    shares_policy: ClassVar[bool] = True

    #: The trainer's module is the engine's.
    weights_form: ClassVar[WeightsForm] = "shared"

    def __init__(
        self,
        model: nn.Module,
        *,
        max_context: int,
        max_sessions: int = 64,
        max_batch_tokens: int = 4096,
        version: int = 0,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        use_packed_attention(model)
        check_context(model.config, max_context)
        self.stats = EngineStats()
        self._model, self.max_context = model, max_context
        self._max_sessions, self._max_batch_tokens = max_sessions, max_batch_tokens
        self.n_vocab = int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
        self.policy_version, self.policy_fingerprint, self._decode = version, "", decode
        limits = {"max_context": max_context, "max_sessions": max_sessions, "max_batch_tokens": max_batch_tokens}
        self.options: dict[str, Any] = {**limits, "decode": decode}
        self._cache = KVCache(max_sessions, max_context)
        self._table = SlotTable(max_sessions, max_context, self.stats)
        self._waiting: list[Request] = []
        self._n_requests = 0
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def cache_bytes(self) -> int:
        """Memory of all keys and values; none after `load` until the next call."""
        return self._cache.n_bytes

    async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
        """Sample once. Of calls of one session at a time, the first one's cache is kept; of calls without one, none.

        The result depends on prompt, parameters and weights, and not on what else runs. A generation during which
        `load` was called goes on with the new weights; its `version_spans` say which tokens are whose.

        Raises:
            ContextFull: the prompt leaves no room for a token.
            EngineError: the engine is closed, an id is outside the vocabulary, or the model failed.
        """
        where = "TransformersEngine.generate"
        if self._closed:
            raise EngineError("the engine is closed", where=where)
        check_prompt(prompt, where, max_context=self.max_context, n_vocab=self.n_vocab)
        if params.stop_strings and self._decode is None:
            raise EngineError("stop strings need a tokenizer", where="TransformersEngine", expected="decode=...")
        loop = asyncio.get_running_loop()
        self._adopt(loop)
        ids = prompt.ids.astype(np.int64)
        adapter, own = number_of(self._model, prompt.adapter, where), own_session(session, prompt.adapter)
        request = Request(prompt, ids, params, own, loop.create_future(), self._n_requests, adapter)
        self._n_requests += 1
        self._waiting.append(request)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run(), name="rollout engine")
        try:
            return await request.future
        except asyncio.CancelledError:
            self._withdraw(request)
            raise

    async def release(self, session: str) -> None:
        """Forget a session's cache. What it still runs or waits for returns at once, with `Finish.ABORT`."""
        for adapter in adapter_names(self._model):
            self._release(own_session(session, adapter))

    def _release(self, session: str) -> None:
        for request in [r for r in self._outstanding() if session and r.session == session]:
            ids, logprobs = self._withdraw(request)
            self._answer(request, ids, logprobs, Finish.ABORT)
        slot = self._table.idle_slot(session)
        if slot is not None:
            self._table.forget(slot)

    async def load(self, weights: PolicyWeights) -> None:
        """Use the module's present parameters as `weights.version`: prove that they are it, and drop every cache.

        Raises:
            DeliveryError: the version is older than the present one or was delivered with other parameters, or the
                parameters are not those announced.
        """
        found = self._verified(weights)
        if weights.version != self.policy_version:
            self._table.begin_version(weights.version)
        self.policy_version, self.policy_fingerprint = weights.version, found
        self.drop_cache()

    async def sleep(self) -> None:
        """Free the KV cache; a continuing session computes it again."""
        self.drop_cache()

    def drop_cache(self) -> None:
        """Free keys and values, and compute them again where they are needed."""
        self._cache.clear()
        self._table.forget_cache()

    async def close(self) -> None:
        """Stop; calls still running fail with EngineError, as do later ones. Frees the cache."""
        self._closed = True
        task, self._task = self._task, None
        self._fail_all(None)
        if task is not None and not task.done() and self._loop is asyncio.get_running_loop():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _check_version(self, weights: PolicyWeights, where: str) -> None:
        if weights.version < self.policy_version:
            raise DeliveryError(
                "weights are older than those in use",
                where=where,
                got=f"version {weights.version}",
                expected=f"at least {self.policy_version}",
            )

    def _verified(self, weights: PolicyWeights) -> str:
        """Return the fingerprint of the module's parameters, if they may be called `weights`."""
        where = f"TransformersEngine.load, version {weights.version}"
        if weights.form != "shared":
            raise DeliveryError(
                "this engine shares the trainer's parameters and takes no delivery",
                where=where,
                got=f"{weights.form} weights",
                expected="shared weights",
            )
        self._check_version(weights, where)
        found = fingerprint(self._model)
        if weights.fingerprint and weights.fingerprint != found:
            raise DeliveryError(
                "the engine's parameters differ from the published ones",
                where=where,
                got=found,
                expected=weights.fingerprint,
                hint="trainer and engine must share one module, and nothing may change it between publishing and load",
            )
        if weights.version == self.policy_version and self.policy_fingerprint not in ("", found):
            raise DeliveryError(
                "this version was delivered before with different parameters",
                where=where,
                got=found,
                expected=self.policy_fingerprint,
                hint="increase the version with every publication",
            )
        return found

    def _adopt(self, loop: asyncio.AbstractEventLoop) -> None:
        """Move to a new event loop; requests of an earlier one, which is over, are forgotten."""
        if self._loop is loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise EngineError("the engine is in use by another event loop", where="TransformersEngine.generate")
        for request in self._outstanding():
            self._withdraw(request)
        self._loop, self._task = loop, None

    def _outstanding(self) -> list[Request]:
        return [r for r in self._table.requests if r is not None] + self._waiting

    def _withdraw(self, request: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Take a request out, wherever it stands; returns what it has sampled. Its session keeps its cache."""
        if request.slot >= 0:
            return self._table.end(request.slot)
        if request in self._waiting:
            self._waiting.remove(request)
        return (), ()

    async def _run(self) -> None:
        """Work until nothing is left; the next call of `generate` starts a new task."""
        try:
            while self._waiting or self._table.busy.any():
                self._step()
                await self._breathe()
        except Exception as error:  # a fault of the engine itself: whoever waits must hear of it
            self._fail_all(error)
        except asyncio.CancelledError:
            self._fail_all(None)
            raise

    async def _breathe(self) -> None:
        """Let the event loop run between two steps."""
        await asyncio.sleep(0)

    @torch.inference_mode()
    def _step(self) -> None:
        """Admit, compute, sample, answer."""
        for request, copy in self._table.admit(self._waiting):
            if copy is not None:
                self._take_over(request.slot, copy)
        self._waiting = [r for r in self._waiting if r.slot < 0]
        segments = self._table.segments(self._max_batch_tokens)
        try:
            logits = self._forward(segments)
            if segments.samples.any():
                self._sample(segments, logits)
            else:
                self._table.advance(segments, np.empty(0, np.int64), np.empty(0, np.float32))
        except Exception as error:  # the model's fault becomes each request's error, and the loop goes on
            self._fail(segments.slots.tolist(), "the model failed", error)

    def _take_over(self, slot: int, copy: Copy) -> None:
        """Copy the keys and values of a prefix that another session has computed."""
        self._cache.reserve(slot + 1, copy.n_tokens)
        self._cache.copy(copy.source, copy.target, copy.n_tokens)

    def _forward(self, segments: Segments) -> Tensor:
        """Logits after the segments that sample, `[n, V]`."""
        slots, starts, counts = segments.slots, segments.starts, segments.counts
        n_new, n_selected = int(counts.sum()), int(segments.samples.sum())
        n_tokens = -(-n_new // _ROW_STEP) * _ROW_STEP
        device = self._model.get_input_embeddings().weight.device  # type: ignore[operator]
        self._cache.reserve(int(slots[-1]) + 1, int((starts + counts).max()))
        plan = SlotPlan(self._cache, slots, starts, counts, n_tokens, device)
        rows = np.zeros((2, n_tokens), np.int64)
        rows[0, :n_new], rows[1, :n_new] = self._table.token_ids(segments, plan.position_ids), plan.position_ids
        select = np.zeros(max(1, -(-n_selected // _ROW_STEP)) * _ROW_STEP, np.int64)
        select[:n_selected] = (np.cumsum(counts) - 1)[segments.samples]
        token_ids, position_ids = torch.from_numpy(rows).to(device)
        if self._model.training:
            self._model.eval()
        begin = time.perf_counter()
        at = torch.from_numpy(select).to(device)
        logits = planned_forward(self._model, token_ids, position_ids, plan, at, self._read_by(segments, n_tokens))
        self.stats.forward_s += time.perf_counter() - begin
        self.stats.n_forward += 1
        self.stats.n_prefill_tokens += n_new - int((counts == 1).sum())
        return logits[:n_selected]

    def _read_by(self, segments: Segments, n_tokens: int) -> Ints | None:
        """Adapter number of each token of a pass, `[n_tokens]`; None where the shared one reads all."""
        numbers = self._table.adapters(segments)
        if not numbers.any():
            return None
        # What fills up the last rows goes with the last token, so that a pass of one adapter stays one.
        return np.pad(numbers, (0, n_tokens - len(numbers)), mode="edge")

    def _sample(self, segments: Segments, logits: Tensor) -> None:
        """Sample a token for each active segment, and answer the requests that end."""
        slots = segments.slots[segments.samples]
        tokens_, logprobs_ = sample(logits, self._table.sampling_rows(slots))
        tokens, logprobs = tokens_.cpu().numpy(), logprobs_.cpu().numpy()
        for slot in slots[self._table.is_first(slots)].tolist():
            request = self._table.requests[slot]
            if request is not None:
                request.version = self.policy_version
        stopped, full = self._table.advance(segments, tokens, logprobs)
        stopped, full = self._stopped_by_text(slots, stopped, full)
        self.stats.n_generated_tokens += len(slots)
        broken = slots[~np.isfinite(logprobs)].tolist()
        if broken:
            self._fail(broken, "the model's logits are not finite", None)
        for finish, ended in ((Finish.STOP, stopped), (Finish.LENGTH, full)):
            for slot in ended.tolist():
                request = self._table.requests[slot]
                if request is not None:
                    self._answer(request, *self._table.end(slot), finish)

    def _stopped_by_text(self, slots: Ints, stopped: Ints, full: Ints) -> tuple[Ints, Ints]:
        """Add to `stopped` the slots whose newest token completes a stop string."""
        found = []
        for slot in slots[self._table.wants_text(slots)].tolist():
            request = self._table.requests[slot]
            if request is None or self._decode is None or slot in stopped:
                continue
            strings = request.params.stop_strings
            # A token has at least one byte, so the newest string lies within the last four times as many tokens.
            text = self._decode(self._table.sampled(slot, 4 * max(map(len, strings)) + 4))
            if any(s in text for s in strings):
                found.append(slot)
        if not found:
            return stopped, full
        return np.concatenate([stopped, np.array(found, np.int64)]), full[~np.isin(full, found)]

    def _answer(self, request: Request, ids: tuple[int, ...], logprobs: tuple[float, ...], finish: Finish) -> None:
        version = self.policy_version if request.version is None else request.version
        if not request.future.done():
            spans = request.version_spans(len(ids))
            request.future.set_result(Generation(request.prompt, ids, logprobs, finish, version, spans))

    def _fail(self, slots: Iterable[int], what: str, cause: Exception | None) -> None:
        """End the requests in `slots` with an EngineError. Their keys and values may be garbage: all caches go."""
        for slot in slots:
            request = self._table.requests[slot]
            if request is not None:
                self._table.end(slot)
                self._refuse(request, what, cause)
        self._cache.clear()
        self._table.forget_cache()

    def _fail_all(self, cause: Exception | None) -> None:
        """Every request gets an EngineError, and the engine starts over."""
        what = "the engine failed" if cause else "the engine was closed" if self._closed else "the engine was stopped"
        outstanding, self._waiting = self._outstanding(), []
        self._cache.clear()
        self._table = SlotTable(self._max_sessions, self.max_context, self.stats)
        for request in outstanding:
            request.slot = -1
            self._refuse(request, what, cause)

    def _refuse(self, request: Request, what: str, cause: Exception | None) -> None:
        got = f"{type(cause).__name__}: {cause}" if cause else ""
        hint = "lower engine.max_sessions or engine.max_batch_tokens" if allocation_failure(cause) else ""
        error = EngineError(what, where=f"TransformersEngine, session {request.session!r}", got=got, hint=hint)
        error.__cause__ = cause
        if not request.future.done():
            request.future.set_exception(error)
