"""The embedded engine in a server: its weights arrive in pieces and have names, and it can be paused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rlhf.data import Finish, Generation, Prompt, SamplingParams
from rlhf.errors import EngineError
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.inference.fingerprint import Digest
from rlhf.inference.vllm.instance import PauseMode

#: What the weights are called that the engine begins with, as vLLM has it.
INITIAL = "default"
_POLL_S = 0.002


class PausableEngine(TransformersEngine):
    """A `TransformersEngine` over a module of its own, for `rlhf.serving.embedded`.

    Args:
        model: a whole model without adapters.
        settings: of `TransformersEngine`.
    """

    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__(model.requires_grad_(False), **settings)
        self._admits, self._steps = asyncio.Event(), asyncio.Event()
        self._admits.set()
        self._steps.set()
        self._names = [INITIAL]
        self._own = dict(model.named_parameters(remove_duplicate=False))
        self._arrived, self._digest = set[str](), Digest()

    @property
    def version_name(self) -> str:
        """Name of the weights."""
        return self._names[self.policy_version]

    @property
    def n_running(self) -> int:
        """Requests that are sampled."""
        return sum(request is not None for request in self._table.requests)

    @property
    def n_waiting(self) -> int:
        """Requests that there is no room for."""
        return len(self._waiting)

    @property
    def fingerprint(self) -> str:
        """Digest of the parameters that arrived in the last update."""
        return self._digest.hexdigest()

    async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
        """Sample once; while the engine is paused, after that."""
        await self._admits.wait()
        return await super().generate(prompt, params, session)

    def spans(self, found: Generation) -> Sequence[tuple[str, int]]:
        """Return (name of the weights, tokens) of a generation, in order."""
        spans = found.version_spans or ((found.policy_version, found.n_tokens),)
        return [(self._names[version], n) for version, n in spans]

    async def _breathe(self) -> None:
        await asyncio.sleep(0)
        await self._steps.wait()

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling: `wait` for running requests, `keep` them for later, or `abort` them with the tokens so far."""
        self._admits.clear()
        if mode == "keep":
            self._steps.clear()
        if mode == "abort":
            for request in self._outstanding():
                self._answer(request, *self._withdraw(request), Finish.ABORT)
        while mode == "wait" and self._outstanding():
            await asyncio.sleep(_POLL_S)

    def resume(self) -> None:
        """Sample again."""
        self._admits.set()
        self._steps.set()

    def start_update(self) -> None:
        """Weights are about to arrive."""
        self._arrived, self._digest = set(), Digest()

    @torch.no_grad()
    def put(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take parameters in. Raises EngineError for one that the model does not have."""
        for name, value in tensors:
            if name not in self._own:
                raise EngineError("the engine's model has no such parameter", where="rlhf serve", got=name)
            self._digest.add(name, value)
            self._own[name].copy_(value)
            self._arrived.add(name)

    def finish_update(self) -> None:
        """All have arrived: later tokens are by other weights. Raises EngineError where parameters are missing."""
        if missing := sorted(set(self._own) - self._arrived) if self._arrived else []:
            raise EngineError("not every parameter arrived", where="rlhf serve", got=f"nothing for {missing[0]}")
        self._table.begin_version(len(self._names))
        self.policy_version = len(self._names)
        self._names.append("")
        self.drop_cache()

    def rename(self, name: str) -> None:
        """Say what the weights are called."""
        self._names[self.policy_version] = name
