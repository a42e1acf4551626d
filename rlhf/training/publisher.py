"""Weight publisher: delivers the policy to the rollout engine, and proves arrival by fingerprint and canary.

Three proofs, always on. The engine compares fingerprints and versions (see its `load`). Then both sides say how likely
canaries are: prompts that the engine continues, and whose continuations the trainer scores. They must agree, as closely
as they did before with the same weights; and where the trainer's figures for the first canary, always the same,
have moved since the last delivery, the engine's must have moved too. The tokens of the others are drawn anew each time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch

from rlhf.data import Generation, PolicyWeights, Prompt, SamplingParams
from rlhf.errors import DeliveryError
from rlhf.inference.embedded.attention import packed_forward
from rlhf.inference.engine import RolloutEngine
from rlhf.inference.fingerprint import fingerprint
from rlhf.inference.model_config import ModelWrapper
from rlhf.inference.role_adapters import SHARED, adapter_names, refuse_roles
from rlhf.inference.seeds import stable_seed
from rlhf.training.backends.sharded import assembled, device_of
from rlhf.training.policy.lora import merged
from rlhf.training.policy.model import Policy

#: Tokens of the canary: its prompt, long enough to fill blocks of a prefix cache, and what the engine adds.
N_PROMPT, N_SAMPLED = 80, 4

#: Canaries that are drawn anew: at the first delivery, which measures how far rounding goes, and at a later one.
N_FIRST, N_LATER = 3, 1

#: Most nats that two computations with the same weights differ, by number format: what is allowed in any case, and what
#: a measurement may raise it to. On a CPU float32 is exact enough for the first; GPUs multiply more coarsely.
TOLERANCES = {torch.float32: (1e-3, 2e-2), torch.bfloat16: (5e-2, 0.25), torch.float16: (5e-2, 0.25)}

#: How many times the largest difference that was seen is allowed.
_TIMES = 8.0

#: Differences below this many nats are rounding, in float32.
_ROUNDING = 1e-5


def parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter by its Hugging Face name, one at a time, gathered and merged.

    A parameter that two modules share comes once for each name, as an engine may keep two copies. A process that shares
    parameters with others must walk to the end when they do. The tensors are valid until the next is drawn.
    Adapters of roles are a ModelError.
    """
    unwrapped = ModelWrapper(model).inner
    refuse_roles(unwrapped)
    base = ModelWrapper(unwrapped).base
    for prefix, module in base.named_modules(remove_duplicate=False):
        name_of = prefix.removesuffix(".base_layer")
        if ".lora_" in f".{prefix}":
            continue
        owner = _adapted_owner(base, prefix)
        for name, _ in module.named_parameters(recurse=False):
            with assembled(module, name.__eq__) if owner is None else assembled(owner):
                value = module._parameters[name].detach()
                if owner is not None and name == "weight":
                    value = merged(owner, value)
                yield f"{name_of}.{name}" if name_of else name, value


def adapter_parameters(model: Any, role: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of the PEFT adapter of a role by the name it has in `adapter_model.safetensors`."""
    from peft import get_peft_model_state_dict

    unwrapped = ModelWrapper(model).inner
    with assembled(unwrapped, lambda path: ".lora_" in path):  # an adapter is small
        yield from get_peft_model_state_dict(
            unwrapped, adapter_name=role or SHARED, save_embedding_layers=False
        ).items()


def adapter_config(model: Any) -> dict[str, Any]:
    """The adapter's settings as its `adapter_config.json` has them."""
    unwrapped = ModelWrapper(model).inner
    settings: Mapping[str, Any] = unwrapped.peft_config[unwrapped.active_adapters[0]].to_dict()
    return {name: _plain(value) for name, value in settings.items()}


@dataclass
class Publisher:
    """Delivers one policy to one engine, and keeps the canary's log-probs.

    Args:
        policy: whose `version` counts publications.
        engine: takes the weights.
        tolerance: most nats of difference on the canaries; None is measured, within bounds of the number format.
        dtype: the engine's number format; None is the policy's.
        timeout_s: most seconds for the canary.

    Attributes:
        figures: of the last delivery, by metric name.
    """

    policy: Policy
    engine: RolloutEngine
    tolerance: float | None = None
    dtype: torch.dtype | None = None
    timeout_s: float = 300.0
    figures: dict[str, float] = field(default_factory=dict)
    _last: dict[str, _Said] = field(default_factory=dict)
    _seen: dict[str, float] = field(default_factory=dict)
    _judged_in: torch.dtype | None = None

    async def publish(self) -> None:
        """Hand over the policy's present weights under its present version.

        Raises:
            DeliveryError: they did not arrive; the message says whose copy is stale.
        """
        begin = time.perf_counter()
        self.figures.clear()
        if self._judged_in is not self._format:  # differences seen in another number format say nothing of this one
            self._judged_in = self._format
            self._seen.clear()
            self._last.clear()
        await self.engine.load(self._weights())
        for adapter in adapter_names(self.policy.model):
            fixed, *drawn = await self._ask(adapter)
            self._judge(fixed, drawn, adapter)
            self._last[adapter] = fixed
        self.figures["time/publish_s"] = time.perf_counter() - begin

    @property
    def _format(self) -> torch.dtype:
        """The coarser one of the two that compute."""
        own: torch.dtype = self.policy.model.dtype
        found = max(own, self.dtype or own, key=lambda one: torch.finfo(one).eps)
        # A base in 8 bits rounds activations too, as coarsely as 16 bits do.
        is_rounded = any(p.dtype is torch.int8 for p in self.policy.model.parameters())
        return torch.bfloat16 if is_rounded and found is torch.float32 else found

    @property
    def _is_exact(self) -> bool:
        """True if products are float32 throughout; a GPU may round on the way."""
        return self._format is torch.float32 and device_of(self.policy.model).type == "cpu"

    def _weights(self) -> PolicyWeights:
        model, version = self.policy.model, self.policy.version
        form = self.engine.weights_form
        if form == "shared":
            return PolicyWeights(version, fingerprint(model))
        if form == "adapter":
            walks = {role: partial(adapter_parameters, model, role) for role in adapter_names(model)}
            return PolicyWeights(version, "", walks.pop(""), adapter_config(model), walks)
        return PolicyWeights(version, "", lambda: parameters(model))

    def _canaries(self, adapter: str) -> list[Prompt]:
        """Canary prompts: a fixed one, and others whose tokens depend on the version."""
        n_vocab = int(self.policy.model.get_input_embeddings().num_embeddings)
        n_prompt = max(1, min(N_PROMPT, self.engine.max_context - N_SAMPLED - 1))
        n_drawn = N_LATER if adapter in self._last else N_FIRST
        seeds = [stable_seed("canary"), *(stable_seed("canary", self.policy.version, n) for n in range(n_drawn))]
        n_known = min(n_vocab, len(self.policy.tokenizer))
        ids = [np.random.default_rng(seed).integers(0, n_known, n_prompt) for seed in seeds]
        return [Prompt(tuple(one.tolist()), adapter=adapter) for one in ids]

    async def _ask(self, adapter: str) -> list[_Said]:
        greedy, prompts = SamplingParams(N_SAMPLED, temperature=0.0), self._canaries(adapter)
        try:
            async with asyncio.timeout(self.timeout_s):
                found = await asyncio.gather(*(self.engine.generate(prompt, greedy) for prompt in prompts))
        except TimeoutError:
            raise DeliveryError(
                "the engine does not answer after a delivery of weights",
                where=f"delivery of version {self.policy.version}",
                got=f"nothing in {self.timeout_s:g} s",
            ) from None
        return [self._score(generation, adapter) for generation in found]

    def _score(self, generation: Generation, adapter: str) -> _Said:
        ids = generation.prompt.token_ids
        scored = token_logprobs(self.policy.model, ids[:1], generation.full_ids[1:], adapter)
        of_prompt, trainer = np.split(scored, [len(ids) - 1])
        return _Said(generation.token_ids, np.array(generation.logprobs), trainer, of_prompt, generation.policy_version)

    def _judge(self, fixed: _Said, drawn: Sequence[_Said], adapter: str) -> None:
        worst = max([fixed, *drawn], key=lambda said: said.gap)
        tolerance = self._tolerance(worst.gap, adapter)
        self._note("delivery/canary_gap", worst.gap)
        self._note("delivery/canary_tolerance", tolerance)
        where = f"delivery of version {self.policy.version}, canary{adapter and f' of the adapter {adapter}'}"
        others = {said.version for said in (fixed, *drawn)} - {self.policy.version}
        if others:
            raise DeliveryError(
                "the engine samples from another version: the engine is stale",
                where=where,
                got=f"version {min(others)}",
                expected=f"version {self.policy.version}",
            )
        last = self._last.get(adapter)
        stale = self._stale(fixed, last, tolerance, self._seen.get(adapter, 0.0))
        if stale or not worst.gap <= tolerance:
            raise DeliveryError(
                f"trainer and engine disagree about the policy: {stale or _unknown(last)}",
                where=where,
                got=f"log-probs {_shown(worst.engine)} in the engine, {_shown(worst.trainer)} in the trainer",
                expected=f"at most {tolerance:g} nats between them",
                hint="" if stale else "if a low-precision number format explains it, raise engine.canary_tolerance",
            )
        self._seen[adapter] = max(worst.gap, self._seen.get(adapter, 0.0))

    def _tolerance(self, gap: float, adapter: str) -> float:
        """Tolerance in nats: a multiple of past differences, within bounds."""
        if self.tolerance is not None:
            return self.tolerance
        least, most = TOLERANCES[self._format]
        if self._is_exact:
            return least
        return min(most, max(least, _TIMES * self._seen.get(adapter, gap)))

    def _note(self, name: str, value: float) -> None:
        """Keep a figure, the largest of all adapters."""
        self.figures[name] = max(value, self.figures.get(name, value))

    def _stale(self, said: _Said, last: _Said | None, tolerance: float, seen: float) -> str:
        """Side whose figures stood still while the other's moved, if the canary can tell."""
        if last is None:
            return ""
        gap = said.gap
        noise = max(4 * _ROUNDING, 2 * seen) if self._format is torch.float32 else tolerance
        moved = _difference(said.of_prompt, last.of_prompt)
        self._note("delivery/canary_moved", moved)
        if last.token_ids != said.token_ids:  # the engine has moved
            if moved <= noise and gap > tolerance:
                return "the trainer is stale, its figures have not moved while the engine's likeliest tokens are others"
            return ""
        engine, trainer = _difference(said.engine, last.engine), _difference(said.trainer, last.trainer)
        if trainer > noise and engine < trainer / 8 and gap > trainer / 2:
            return f"the engine is stale, its figures have not moved while the trainer's moved by {trainer:.2g} nats"
        if engine > noise and max(trainer, moved) < engine / 8 and gap > max(tolerance, engine / 2):
            return f"the trainer is stale, its figures have not moved while the engine's moved by {engine:.2g} nats"
        return ""


@dataclass(frozen=True)
class _Said:
    """Log-probs of both sides for the canary.

    The sampled tokens `[T]` and their log-probs `[T]` in nats, and the trainer's of the prompt's own tokens `[P - 1]`,
    which can be compared whatever the engine samples.
    """

    token_ids: tuple[int, ...]
    engine: np.ndarray[Any, Any]
    trainer: np.ndarray[Any, Any]
    of_prompt: np.ndarray[Any, Any]
    version: int

    @property
    def gap(self) -> float:
        """Nats between both."""
        return _difference(self.engine, self.trainer)


def _unknown(last: _Said | None) -> str:
    if last is None:
        return "at the first delivery it is unknown whose copy is stale"
    return "both have moved, to different weights"


def _difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float(np.abs(a - b).max(initial=0.0))


@torch.no_grad()
def token_logprobs(
    model: Any, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...], adapter: str = ""
) -> np.ndarray[Any, Any]:
    """Log-probs `[T]` in nats that `model` gives to `token_ids` after `prompt_ids`, at temperature 1.

    Where roles have adapters of their own, that of the role `adapter` reads them.
    """
    was_training = model.training
    model.eval()
    device = device_of(model)
    full = torch.tensor(prompt_ids + token_ids, device=device)
    select = torch.arange(len(prompt_ids) - 1, len(full) - 1, device=device)
    logp = packed_forward(model, full, [len(full)], select, [adapter]).float().log_softmax(-1)
    chosen = logp.gather(-1, full[len(prompt_ids) :, None])[:, 0]
    model.train(was_training)
    return chosen.double().cpu().numpy()


def _adapted_owner(base: Any, prefix: str) -> Any:
    """The LoRA layer around the module at `prefix`, if there is one."""
    if not prefix.endswith(".base_layer"):
        return None
    return base.get_submodule(prefix.removesuffix(".base_layer"))


def _plain(value: Any) -> Any:
    """A value of a PEFT configuration as JSON has it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value))
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _shown(values: np.ndarray[Any, Any]) -> str:
    return "[" + ", ".join(f"{x:.4f}" for x in values) + "]"
