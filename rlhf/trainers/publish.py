"""The policy's weights to the rollout engine, and the proof that they arrived.

Three proofs, always on. The engine compares fingerprints and versions (see its `load`). Then both sides say how likely
a canary is: a fixed prompt that the engine continues, and whose continuation the trainer scores. They must agree; and
where the trainer's figures have moved since the last delivery, the engine's must have moved too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch

from rlhf.data import PolicyWeights, Prompt, SamplingParams
from rlhf.errors import DeliveryError
from rlhf.rollout.attention import packed_forward
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.fingerprint import fingerprint
from rlhf.rollout.role_adapters import SHARED, adapter_names, refuse_roles
from rlhf.rollout.seeds import stable_seed
from rlhf.trainers.lora import merged
from rlhf.trainers.policy import Policy
from rlhf.trainers.sharded import device_of, gathered

#: Tokens of the canary: its prompt, long enough to fill blocks of a prefix cache, and what the engine adds.
N_PROMPT, N_SAMPLED = 80, 4

#: Most nats that two computations with the same weights differ, by number format.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}

#: Differences below this many nats are rounding, in float32.
_ROUNDING = 1e-5


def parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter by its Hugging Face name, one at a time: gathered under ZeRO-3, adapters merged in.

    A parameter that two modules share comes once for each name, as an engine may keep two copies. A process that shares
    parameters with others must walk to the end when they do. The tensors are valid until the next is drawn.
    Adapters of roles are a ModelError.
    """
    unwrapped = getattr(model, "module", model)
    refuse_roles(unwrapped)
    base = unwrapped.get_base_model() if hasattr(unwrapped, "get_base_model") else unwrapped
    for prefix, module in base.named_modules(remove_duplicate=False):
        name_of = prefix.removesuffix(".base_layer")
        if ".lora_" in f".{prefix}":
            continue
        owner = _adapted_owner(base, prefix)
        for name, parameter in module.named_parameters(recurse=False):
            with gathered([parameter, *(owner.parameters() if owner is not None else ())]):
                value = parameter.detach()
                if owner is not None and name == "weight":
                    value = merged(owner, value)
                yield f"{name_of}.{name}" if name_of else name, value


def adapter_parameters(model: Any, role: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of the PEFT adapter of a role by the name it has in `adapter_model.safetensors`."""
    from peft import get_peft_model_state_dict

    unwrapped = getattr(model, "module", model)
    trained = [p for n, p in unwrapped.named_parameters() if ".lora_" in n]
    with gathered(trained):  # an adapter is small
        yield from get_peft_model_state_dict(unwrapped, adapter_name=role or SHARED).items()


def adapter_config(model: Any) -> dict[str, Any]:
    """The adapter's settings as its `adapter_config.json` has them."""
    unwrapped = getattr(model, "module", model)
    settings: Mapping[str, Any] = unwrapped.peft_config[unwrapped.active_adapters[0]].to_dict()
    return {name: _plain(value) for name, value in settings.items()}


@dataclass
class Publisher:
    """Delivers one policy to one engine, and remembers what the canary said.

    Args:
        policy: whose `version` counts publications.
        engine: takes the weights.
        tolerance: most nats of difference on the canary; None is by the engine's number format.
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

    async def deliver(self) -> None:
        """Hand over the policy's present weights under its present version.

        Raises:
            DeliveryError: they did not arrive; the message says whose copy is stale.
        """
        begin = time.perf_counter()
        self.figures.clear()
        await self.engine.load(self._weights())
        for adapter in adapter_names(self.policy.model):
            said = await self._ask(adapter)
            self._judge(said, adapter)
            self._last[adapter] = said
        self.figures["time/publish_s"] = time.perf_counter() - begin

    @property
    def _format(self) -> torch.dtype:
        found: torch.dtype = self.dtype or self.policy.model.dtype
        return found

    def _weights(self) -> PolicyWeights:
        model, version = self.policy.model, self.policy.version
        form = self.engine.weights_form
        if form == "shared":
            return PolicyWeights(version, fingerprint(model))
        if form == "adapter":
            walks = {role: partial(adapter_parameters, model, role) for role in adapter_names(model)}
            return PolicyWeights(version, "", walks.pop(""), adapter_config(model), walks)
        return PolicyWeights(version, "", lambda: parameters(model))

    async def _ask(self, adapter: str) -> _Said:
        n_vocab = int(self.policy.model.get_input_embeddings().num_embeddings)
        n_prompt = max(1, min(N_PROMPT, self.engine.max_context - N_SAMPLED - 1))
        ids = np.random.default_rng(stable_seed("canary")).integers(
            0, min(n_vocab, len(self.policy.tokenizer)), n_prompt
        )
        prompt = Prompt(tuple(ids.tolist()), adapter=adapter)
        try:
            async with asyncio.timeout(self.timeout_s):
                generation = await self.engine.generate(prompt, SamplingParams(N_SAMPLED, temperature=0.0))
        except TimeoutError:
            raise DeliveryError(
                "the engine took the weights and does not answer",
                where=f"delivery of version {self.policy.version}",
                got=f"nothing in {self.timeout_s:g} s",
            ) from None
        scored = token_logprobs(self.policy.model, prompt.token_ids[:1], generation.full_ids[1:], adapter)
        of_prompt, trainer = np.split(scored, [n_prompt - 1])
        engine = np.array(generation.logprobs)
        return _Said(generation.token_ids, engine, trainer, of_prompt, generation.policy_version)

    def _judge(self, said: _Said, adapter: str) -> None:
        gap = _difference(said.engine, said.trainer)
        tolerance = self.tolerance if self.tolerance is not None else TOLERANCE[self._format]
        self._note("delivery/canary_gap", gap)
        where = f"delivery of version {self.policy.version}, canary{adapter and f' of the adapter {adapter}'}"
        if said.version != self.policy.version:
            raise DeliveryError(
                "the engine samples from another version: the engine is stale",
                where=where,
                got=f"version {said.version}",
                expected=f"version {self.policy.version}",
            )
        last = self._last.get(adapter)
        stale = self._stale(said, last, gap, tolerance)
        if stale or not gap <= tolerance:
            raise DeliveryError(
                f"trainer and engine disagree about the policy: {stale or _unknown(last)}",
                where=where,
                got=f"log-probs {_shown(said.engine)} in the engine, {_shown(said.trainer)} in the trainer",
                expected=f"at most {tolerance:g} nats between them",
                hint="" if stale else "if it is rounding in a coarse number format, raise engine.canary_tolerance",
            )

    def _note(self, name: str, value: float) -> None:
        """Keep a figure, the largest of all adapters."""
        self.figures[name] = max(value, self.figures.get(name, value))

    def _stale(self, said: _Said, last: _Said | None, gap: float, tolerance: float) -> str:
        """Whose figures stood still while the other's moved, if the canary can tell."""
        if last is None:
            return ""
        noise = 4 * (_ROUNDING if self._format is torch.float32 else tolerance / 4)
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
    """What both sides say about the canary.

    The sampled tokens `[T]` and their log-probs `[T]` in nats, and the trainer's of the prompt's own tokens `[P - 1]`,
    which can be compared whatever the engine samples.
    """

    token_ids: tuple[int, ...]
    engine: np.ndarray[Any, Any]
    trainer: np.ndarray[Any, Any]
    of_prompt: np.ndarray[Any, Any]
    version: int


def _unknown(last: _Said | None) -> str:
    if last is None:
        return "whose copy is stale cannot be told at the first delivery"
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
