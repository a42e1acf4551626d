"""LoRA adapters: recipe keys, and adapters on a model."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.roles import never_called
from rlhf.checking import KEEPS_WHOLE, CheckContext, Problem
from rlhf.errors import ModelError
from rlhf.extras import missing
from rlhf.inference.model_config import ModelWrapper
from rlhf.inference.role_adapters import SHARED, refuse_names, refuse_roles, route
from rlhf.inference.settings import VllmSettings
from rlhf.settings import STRICT
from rlhf.training.backends.master_weights import rounded_at_random

# peft imports bitsandbytes for any adapter, which warns of a kernel that a CPU may lack, and, at every layer of every
# pass, that it rounds.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

_SHARED_ONE = "plain actions have the adapter that is shared; remove the role"
_UNSAID = "let the agent say in which roles it calls the policy, in an attribute `roles`, or remove the role"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Lora:
    """Low-rank adapters (Hu et al., arXiv 2106.09685) by PEFT; the base weights stay frozen."""

    rank: Annotated[int, Field(ge=1)] = 16
    """LoRA rank."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """LoRA alpha: adapter outputs are scaled by alpha/rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """LoRA dropout."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Target modules, such as [q_proj, v_proj]; or all linear layers except the output layer."""
    rslora: bool = False
    """Scale by alpha/sqrt(rank) instead (arXiv 2312.03732)."""
    dora: bool = False
    """Learn the length of each row of a weight apart from its direction, which the adapter turns (DoRA, arXiv
    2402.09353). vLLM cannot hold such adapters beside the base: it needs `engine.lora: merged`."""
    quantization: Literal["4bit", "8bit"] | None = None
    """Keep the base in 4 bits, as NF4 with quantised scales (QLoRA, arXiv 2305.14314), or in 8 with a scale a row
    (LLM.int8, arXiv 2208.07339): bitsandbytes, a pretrained policy, the plain trainer and the embedded engine."""
    roles: tuple[str, ...] = ()
    """Roles of the agent with their own adapter, such as [plan]; all others share one. One base, and one forward pass,
    serve them all. A role with the name of a module of the model is refused."""

    def __post_init__(self) -> None:
        for name in self.roles:
            if not re.fullmatch(r"[A-Za-z0-9_-]+( [A-Za-z0-9_-]+)*", name) or name == SHARED:
                raise ValueError(
                    "roles takes names of letters, digits, _, - and single blanks, and not "
                    f"{SHARED}, which all others share; got {name!r}"
                )
        if len(set(self.roles)) < len(self.roles):
            raise ValueError("roles names a role twice")
        if self.roles and self.dora:
            raise ValueError("roles takes plain adapters: remove dora, or roles")

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse engines, trainers, stages and roles that do not go with adapters as these."""
        if context.stage is not None:
            yield from self._of_scorer(context)
            return
        if self.dora:
            yield from self._turned(context)
        if self.quantization is not None:
            yield from self._quantized(context)
        if self.roles:
            yield from self._of_roles(context)

    def _of_scorer(self, context: CheckContext) -> Iterator[Problem]:
        """Yield problems of a critic's or a reward model's adapters."""
        whose = "a reward model" if context.kind_of("stage", context.stage) == "reward_model" else "a critic"
        if self.quantization is not None:
            expected = "a base in its own number format"
            yield no_base(context.at("quantization"), self.quantization, whose, expected)
        if self.roles:
            yield Problem(
                f"{whose} has no roles",
                where=context.at("roles"),
                got=", ".join(self.roles),
                expected="nothing",
                do="remove the key",
            )

    def _turned(self, context: CheckContext) -> Iterator[Problem]:
        """Yield problems of DoRA."""
        engine = context.recipe.engine
        if isinstance(engine, VllmSettings) and engine.lora == "adapter":
            yield Problem(
                "vLLM cannot hold DoRA adapters beside the base",
                where="engine.lora",
                got="adapter, with policy.lora.dora",
                expected="merged",
                do="set engine.lora: merged, or use plain LoRA",
            )
        for path, said in context.recipe.sharded.items():
            yield Problem(
                "DoRA needs whole base weights, which this trainer shards",
                where=f"{path}.{said.partition(':')[0]}",
                got=f"{said}, with policy.lora.dora",
                expected=KEEPS_WHOLE,
                do="use such a trainer, or plain LoRA",
            )

    def _quantized(self, context: CheckContext) -> Iterator[Problem]:
        """Yield problems of a quantised base; trainers and critics have some of their own."""
        where, said, recipe = context.at("quantization"), self.quantization, context.recipe
        if recipe.policy.needs_texts:
            yield no_base(where, said, "a policy made from scratch", "policy: {kind: pretrained}")
        if isinstance(recipe.engine, VllmSettings):
            yield no_base(where, said, "vLLM, whose base would be another", "engine: {kind: transformers}")
        elif recipe.asynchrony.is_on:
            yield no_base(where, said, "asynchrony, whose engine merges adapters into a copy", "synchronous training")

    def _of_roles(self, context: CheckContext) -> Iterator[Problem]:
        """Yield problems of adapters of roles."""
        recipe = context.recipe
        is_vllm = isinstance(recipe.engine, VllmSettings)
        if is_vllm and recipe.engine.lora == "merged":
            yield _one_set("engine.lora", "merged", "adapter", "they cannot be merged into one set of weights")
        for i, stage in enumerate(recipe.stages):
            path = f"stages[{i}]"
            if not stage.knows_roles:
                why = "this stage knows one set of weights"
                kind = context.kind_of("stage", stage)
                yield _one_set(f"{path}.kind", kind, "supervised or policy_gradient", why)
            if path in recipe.sharded and not is_vllm:
                why = "the embedded engine has a copy then, into which adapters are merged"
                said = recipe.sharded[path]
                expected = f"engine: {{kind: vllm}}, or {KEEPS_WHOLE}"
                yield _one_set(f"{path}.{said.partition(':')[0]}", said, expected, why)
        for path, stage in recipe.learning:
            given = (
                ("critic", stage.critic),
                ("reward_refresh", stage.reward_refresh),
                ("judge_refresh", stage.judge_refresh),
            )
            for key, value in given:
                if value is not None:
                    yield _one_set(f"{path}.{key}", "given", "null", "it works with one set of weights")
        if not context.is_trained:
            yield from self._uncalled(context)

    def _uncalled(self, context: CheckContext) -> Iterator[Problem]:
        """Yield a problem for each role in which the agent never calls the policy."""
        known = [role for role in context.recipe.roles if role]
        for i, role in enumerate(self.roles):
            if role not in known:
                way_out = _SHARED_ONE if context.recipe.roles else _UNSAID
                yield never_called(context.at(f"roles[{i}]"), role, known, way_out)

    def wrap_scorer(self, model: Any) -> Any:
        """A model that says one number, with trainable adapters below and that number's weights trained in full."""
        from peft import get_peft_model

        with self._fitting("lora.target_modules"):
            return get_peft_model(model, self._config("SEQ_CLS", ["score"]), autocast_adapter_dtype=False)

    def wrap(self, model: Any) -> Any:
        """`model` with trainable adapters."""
        from peft import get_peft_model

        with self._fitting("policy.lora.target_modules"):
            # In 16 bits as the base: the optimiser keeps float32 masters, and engines compute with this format too.
            adapted = get_peft_model(model, self._config("CAUSAL_LM"), autocast_adapter_dtype=False)
            self._refuse_tied(adapted)
            roles = sorted(self.roles)  # as they are found in the folder of a checkpoint
            refuse_names(adapted, roles)
            for name in roles:
                adapted.add_adapter(name, copy.deepcopy(adapted.peft_config[SHARED]), autocast_adapter_dtype=False)
            return route(adapted, roles) if roles else adapted

    def _refuse_tied(self, adapted: Any) -> None:
        """Refuse an adapter on one use of a weight that has two: merged, it would change the other."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        base = adapted.get_base_model()
        ends = base.get_input_embeddings(), base.get_output_embeddings()
        if base.config.get_text_config().tie_word_embeddings and any(isinstance(m, BaseTunerLayer) for m in ends):
            raise ModelError(
                "embeddings and output layer of this model are tied: an adapter cannot change only one",
                where="policy.lora.target_modules",
                got=str(self._named),
                expected="layers between the two, or all-linear",
            )

    @property
    def _named(self) -> str | list[str]:
        """Targets as PEFT takes them."""
        return self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)

    def _config(self, task_type: str, whole: Sequence[str] | None = None) -> Any:
        """These settings as PEFT has them; modules that are named `whole` are trained in full."""
        from peft import LoraConfig

        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # declared a whole number, used as a factor
            lora_dropout=self.dropout,
            target_modules=self._named,
            use_rslora=self.rslora,
            use_dora=self.dora,
            task_type=task_type,
            modules_to_save=None if whole is None else list(whole),
        )

    @contextmanager
    def _fitting(self, where: str) -> Iterator[None]:
        """Turn PEFT's refusal of a model into a ModelError."""
        try:
            yield
        except ValueError as error:
            raise ModelError(
                "the adapter does not fit the model",
                where=where,
                got=str(self._named),
                expected="names of linear layers of the model, or all-linear",
                hint=str(error).splitlines()[0],
            ) from error


def no_base(where: str, quantization: str | None, whose: str, expected: str) -> Problem:
    """The problem of a quantised base beside what cannot have one."""
    return Problem(
        "a quantised base does not support this",
        where=where,
        got=f"{quantization} with {whose}",
        expected=expected,
        do="change that, or remove quantization",
    )


def _one_set(where: str, got: str, expected: str, why: str) -> Problem:
    return Problem(
        f"adapters of roles are not supported with this: {why}",
        where=where,
        got=f"{got}, with policy.lora.roles",
        expected=expected,
        do="change that, or remove policy.lora.roles",
    )


def refuse_unquantizable() -> None:
    """Raise MissingPackageError where no model can be quantised: bitsandbytes is not installed."""
    if find_spec("bitsandbytes") is None:
        where, got = "policy.lora.quantization", "no module named bitsandbytes"
        raise missing("quantized", "bitsandbytes is not installed", where, got)


def loading_options(quantization: str | None, dtype: torch.dtype) -> dict[str, Any]:
    """Return what `from_pretrained` needs to hold a base so; nothing where it is not quantised.

    Args:
        quantization: of `Lora`.
        dtype: that is computed in.

    Raises:
        MissingPackageError: see `refuse_unquantizable`.
    """
    if quantization is None:
        return {}
    refuse_unquantizable()
    from transformers import BitsAndBytesConfig

    config_of: Any = BitsAndBytesConfig
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    # Without columns set apart for outliers, which depend on the rows of a batch: engine and trainer have others.
    config = (
        config_of(load_in_8bit=True, llm_int8_threshold=0.0)
        if quantization == "8bit"
        else config_of(load_in_4bit=True, **nf4)
    )
    return {"quantization_config": config, "device_map": {"": 0 if torch.cuda.is_available() else "cpu"}}


def without_packing(model: Any) -> None:
    """Keep the layers of a 4-bit base as they were loaded.

    On some CPUs bitsandbytes lays a layer out anew in its first pass without gradient, where its widths allow it, and
    has no gradient through that layout: the embedded engine samples from what is trained.
    """
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False


def load_adapters(base: Any, saved: Path) -> Any:
    """Load a folder's adapters, of every role, onto their base, in their saved format.

    Raises:
        ModelError: one cannot be read, or is of another model.
    """
    from peft import PeftModel

    try:
        exact: dict[str, Any] = {"is_trainable": True, "autocast_adapter_dtype": _is_in_float32(saved)}
        model = PeftModel.from_pretrained(base, str(saved), **exact)
        roles = _roles_in(saved)
        refuse_names(model, roles)
        for role in roles:
            model.load_adapter(str(saved / role), role, **exact)
        return route(model, roles) if roles else model
    except Exception as error:  # PEFT, torch and safetensors raise one of their own each
        raise ModelError(
            "the adapter cannot be loaded",
            got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            expected="an adapter of the base model",
        ) from error


def _is_in_float32(saved: Path) -> bool:
    """True if the adapter in a folder has float32 weights, whatever its base has."""
    from safetensors import safe_open

    with safe_open(str(saved / "adapter_model.safetensors"), "pt") as file:
        return all(file.get_slice(name).get_dtype() == "F32" for name in file.keys())  # noqa: SIM118


def _roles_in(saved: Path) -> list[str]:
    """Roles of which an adapter lies in a folder within. Checkpoints that Hugging Face's trainers left are none."""
    folders = (path.parent for path in saved.glob("*/adapter_config.json"))
    return sorted(folder.name for folder in folders if not (folder / "trainer_state.json").is_file())


def causal_of(model: Any) -> Any:
    """The causal language model inside of what DeepSpeed and PEFT have put around it."""
    return ModelWrapper(ModelWrapper(model).inner).base


def unadapted(model: Any) -> Any:
    """Plain model under PEFT's `model`, its adapter merged as engines have it (`merged`); dismantles `model`.

    Raises:
        ModelError: roles have adapters of their own, which are no one set of weights.
    """
    from peft.tuners.lora.layer import LoraLayer

    refuse_roles(model)
    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        weight = layer.get_base_layer().weight.data
        if weight.is_floating_point():
            weight.copy_(merged(layer, weight))
        else:  # quantised, for which PEFT knows how
            layer.merge()
    return model.unload()


@torch.no_grad()
def merged(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return a layer's weight `[M, N]` with its adapters in it.

    LoRA gives W' = W + s B A. DoRA gives each row of W' the length m that was learnt for it: m W' / ‖W'‖. A row (3, 4)
    that an adapter adds (0, -4) to, with m = 5, becomes (3, 0) · 5 / 3 = (5, 0). Sums are float32; to bfloat16 they are
    rounded stochastically, always the same way, as most of a small update is less than half a spacing of the weight.

    Args:
        layer: PEFT's, around the one that `weight` is of.
        weight: of the base.
    """
    found = weight.float()
    for adapter in layer.active_adapters:
        delta = layer.get_delta_weight(adapter).detach().float()
        if adapter not in layer.lora_magnitude_vector:
            found = found + delta
            continue
        magnitude = layer.lora_magnitude_vector[adapter]
        length = magnitude.get_weight_norm(found, delta, scaling=1)
        found = (magnitude.weight.float() / length)[:, None] * (found + delta)
    return rounded_at_random(found, found.numel()) if weight.dtype == torch.bfloat16 else found.to(weight.dtype)
