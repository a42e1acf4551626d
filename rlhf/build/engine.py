"""From a recipe's `engine` section to a running rollout engine."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from rlhf.data import WeightsForm
from rlhf.errors import EngineError, ModelError
from rlhf.inference.embedded.attention import check_context
from rlhf.inference.embedded.copied import CopiedEngine
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.inference.embedded.guided import GuidedEngine, UnguidedEngine
from rlhf.inference.engine import RolloutEngine
from rlhf.inference.model_config import ModelConfig
from rlhf.inference.role_adapters import adapter_names, refuse_roles
from rlhf.inference.settings import GuidedSettings, VllmSettings, kv_bytes_per_token
from rlhf.inference.transfer import memory_folder
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.inference.vllm.instance import Instance
from rlhf.inference.vllm.local import LocalInstance
from rlhf.inference.vllm.multi_rank import FollowingEngine, LeadingEngine
from rlhf.inference.vllm.server import ServerInstance
from rlhf.inference.vllm.start import StartOptions
from rlhf.processes import current
from rlhf.recipe import Recipe
from rlhf.recipe.view import copies_policy
from rlhf.training.policy.lora import unadapted
from rlhf.training.policy.model import Policy, Pretrained
from rlhf.training.policy.model_files import check_tokens, load_folder
from rlhf.training.publisher import Publisher, parameters

#: Most of the free memory that the key/value cache of an engine on a CPU takes when the recipe does not say.
_CACHE_SHARE = 0.25

#: Most seconds until a server that is started again answers, where the run starts it.
RETURN_S = 600.0

#: File beside the log, with addresses of servers that take part beside those of the recipe.
ROSTER = "servers.txt"

#: Dimensions by which a server's model is known to be the policy's.
SHAPES = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

#: Model types whose experts vLLM loads from checkpoints alone, by the names these have.
_OTHER_NAMES = ("mixtral",)


async def start_engine(
    recipe: Recipe, policy: Policy, *, log: Path | None = None, tell: Callable[[str], None] | None = None
) -> RolloutEngine:
    """The engine of a recipe, started and checked. It has the policy's architecture, and its weights once delivered.

    Args:
        recipe: says which.
        policy: live; the embedded engine shares its module.
        log: file for what an engine process has to say; beside it is looked for `servers.txt`.
        tell: gets a line for each part of its start.

    Raises:
        RlhfError: it cannot be started, or a server does not fit the policy.
    """
    settings = recipe.engine
    if not isinstance(settings, VllmSettings):
        engine_of: Any = TransformersEngine
        model = policy.model
        if copies_policy(recipe):
            engine_of, model = CopiedEngine, _whole_copy(policy).to("cuda" if torch.cuda.is_available() else "cpu")
        if isinstance(settings, GuidedSettings):
            engine_of = partial(GuidedEngine, guides=_guides(settings, policy), weight=settings.weight)
        made: RolloutEngine = engine_of(
            model,
            max_context=context_of(recipe, policy),
            max_sessions=settings.max_sessions,
            max_batch_tokens=settings.max_batch_tokens,
            version=policy.version,
            decode=decoder_of(policy),
        )
        return made
    rank = adapter_rank(settings, policy)
    check_context(policy.model.config, context_of(recipe, policy))
    if ModelConfig(policy.model.config).model_type in _OTHER_NAMES and not rank:
        raise ModelError(
            "vLLM names the experts of this model differently, so weights cannot be delivered",
            where="engine.kind",
            got=f"vllm, with a model of type {policy.model.config.model_type}",
            expected="a model whose parameters have the same names as in transformers",
            hint="use engine: {kind: transformers}, or adapters beside the base: policy.lora with engine.lora: adapter",
        )
    if settings.sleep and not torch.cuda.is_available():
        raise EngineError(
            "the engine has no GPU memory to release",
            where="engine.sleep",
            got="true, and PyTorch finds no GPU",
            hint="remove the key",
        )
    instances: list[Instance] = [ServerInstance(url) for url in settings.servers]
    if not instances:
        with model_folder(recipe, policy) as folder:
            options = start_options(recipe, settings, policy, folder)
            instances = [LocalInstance.start(options, log, tell)]
    return_s = RETURN_S if recipe.cluster.is_on else 0.0
    roster = log.with_name(ROSTER) if log is not None and settings.servers else None
    form: WeightsForm = "adapter" if rank else "full"
    engine = vllm_engine(settings, instances, policy, form=form, return_s=return_s, roster=roster)
    try:
        await engine.connect(**fit_of(recipe, policy), lora_rank=rank)
    except BaseException:
        await engine.close()
        raise
    return engine


def decoder_of(policy: Policy) -> Callable[[list[int]], str]:
    """Text of token ids, for stop strings: control tokens are in it, as a string may name one."""
    decode = partial(policy.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return lambda ids: str(decode(ids))


def vllm_engine(
    settings: VllmSettings,
    instances: Sequence[Instance],
    policy: Policy,
    *,
    form: WeightsForm,
    return_s: float = 0.0,
    roster: Path | None = None,
) -> VllmEngine:
    """The engine over instances that run; of several processes on the same servers the first one's delivers."""
    kind: type[VllmEngine] = VllmEngine
    if settings.servers and (here := current()).n > 1:
        kind = LeadingEngine if here.is_main else FollowingEngine
    return kind(
        instances,
        form=form,
        dtype=engine_dtype(settings, policy),
        at_update=settings.at_update,
        request_timeout_s=settings.request_timeout_s,
        delivery_timeout_s=settings.delivery_timeout_s,
        buffer_bytes=settings.buffer_mb * 2**20,
        delivery=settings.delivery,
        sleeps=settings.sleep,
        version=policy.version,
        return_s=return_s,
        roster=roster,
    )


def fit_of(recipe: Recipe, policy: Policy) -> dict[str, Any]:
    """Requirements of an instance: shapes, vocabulary and context of the policy."""
    config = policy.model.config.get_text_config()
    shapes = {name: getattr(config, name, None) for name in SHAPES}
    return {"shapes": shapes, "n_vocab": int(config.vocab_size), "max_context": context_of(recipe, policy)}


def _whole_copy(policy: Policy) -> Any:
    """A module of the policy's architecture without adapters, for an engine that cannot share the policy's own."""
    model = copy.deepcopy(policy.model) if policy.load is None else policy.load.whole_copy()
    return unadapted(model) if policy.is_lora else model


def _guides(settings: GuidedSettings, policy: Policy) -> tuple[Any, Any]:
    """The tuned and the base model of a guided engine, on the policy's device. Raises ModelError for other tokens."""
    refuse_roles(policy.model)
    found = []
    for key in ("tuned", "base"):
        where = f"engine.{key} {getattr(settings, key)}"
        model, tokenizer = load_folder(getattr(settings, key), where=where)
        check_tokens(tokenizer, policy.tokenizer, where)
        found.append(model.to(next(policy.model.parameters()).device).requires_grad_(False).eval())
    return found[0], found[1]


def make_publisher(recipe: Recipe, policy: Policy, engine: RolloutEngine) -> Publisher:
    """Return the publisher that delivers the policy to its engine."""
    settings = recipe.engine
    if not isinstance(settings, VllmSettings):
        return Publisher(policy, UnguidedEngine(engine) if isinstance(engine, GuidedEngine) else engine)
    dtype = engine_dtype(settings, policy)
    return Publisher(policy, engine, settings.canary_tolerance, dtype, settings.delivery_timeout_s)


def engine_dtype(settings: VllmSettings, policy: Policy) -> torch.dtype:
    """Number format of the engine's copy."""
    found: torch.dtype = policy.model.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    return found


def context_of(recipe: Recipe, policy: Policy) -> int:
    """Most tokens of prompt and generation together."""
    return min(policy.max_context, recipe.limits.max_context or policy.max_context)


def adapter_rank(settings: VllmSettings, policy: Policy, *, is_server: bool = False) -> int:
    """Rank of the adapters that are delivered beside a frozen base; 0 where full weights are delivered.

    Adapters of roles, which cannot be merged into those, are a ModelError.

    Args:
        settings: `lora` says which, or leaves it to what is faster.
        policy: that is delivered.
        is_server: whether the engine is one, or will be; who delivers to it may have no GPU to merge on.
    """
    if not policy.is_lora:
        return 0
    adapters, delivered = policy.model.peft_config.values(), settings.lora
    if delivered == "auto":
        # What vLLM computes for an adapter costs more than to deliver full weights; those of DoRA it does not know.
        here = torch.cuda.is_available() and not (is_server or settings.servers)
        is_merged = len(adapters) == 1 and (here or any(config.use_dora for config in adapters))
        delivered = "merged" if is_merged else "adapter"
    if delivered == "merged":
        refuse_roles(policy.model)
        return 0
    return max(int(config.r) for config in adapters)


def start_options(
    recipe: Recipe, settings: VllmSettings, policy: Policy, folder: str, *, is_server: bool = False
) -> StartOptions:
    """Start options of an engine, or a server's engine, for `policy`, whose model lies in `folder`."""
    dtype, context = engine_dtype(settings, policy), context_of(recipe, policy)
    return StartOptions(
        model=folder,
        max_context=context,
        dtype=str(dtype).removeprefix("torch."),
        max_sequences=settings.max_sessions,
        max_batch_tokens=settings.max_batch_tokens,
        lora_rank=adapter_rank(settings, policy, is_server=is_server),
        n_adapters=len(adapter_names(policy.model)),
        kv_cache_bytes=_cache_bytes(settings, policy, context, dtype),
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel=settings.tensor_parallel,
        eager=None if settings.eager == "auto" else settings.eager,
        compile=settings.compile,
        kv_cache_dtype=settings.kv_cache_dtype,
        quantization=settings.quantization,
        sleep=settings.sleep,
        texts=is_server
        or any(recipe.at(stage).limits.stop_strings for stage in recipe.stages)
        or bool(recipe.limits.stop_strings),
    )


@contextmanager
def model_folder(recipe: Recipe, policy: Policy) -> Iterator[str]:
    """A folder in Hugging Face format with the policy's architecture and tokenizer, and its weights, adapters merged.

    A pretrained policy's own files serve as they are; its present weights are delivered later.
    """
    if isinstance(recipe.policy, Pretrained):
        yield str(Path(recipe.policy.path).expanduser()) if Path(recipe.policy.path).exists() else recipe.policy.path
        return
    folder = memory_folder()
    try:
        save_merged(policy, folder)
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save_merged(policy: Policy, folder: Path, *, merge: bool = False) -> None:
    """Save the policy as one ordinary model; `merge` adds adapters to the weights, else leaves them out."""
    from safetensors.torch import save_file

    model: Any = policy.model
    if not policy.is_lora:
        policy.save(folder)
        return
    base = model.get_base_model()
    if merge:
        tensors = dict(parameters(model))
    else:
        with model.disable_adapter():
            tensors = dict(_base_parameters(base))
    if ModelConfig(base.config).tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    config = copy.deepcopy(base.config)
    config.architectures, config.dtype = [type(base).__name__], base.dtype  # vLLM goes by these
    config.save_pretrained(folder)
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, str(folder / "model.safetensors"))
    policy.tokenizer.save_pretrained(folder)


def _base_parameters(base: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in base.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter


def _cache_bytes(settings: VllmSettings, policy: Policy, context: int, dtype: torch.dtype) -> int | None:
    """Bytes for keys and values; None leaves it to the share of the GPU."""
    if settings.kv_cache_gb is not None:
        return int(settings.kv_cache_gb * 1e9)
    if torch.cuda.is_available():
        return None
    config = policy.model.config.get_text_config()
    per_token = kv_bytes_per_token(config, dtype.itemsize)
    wanted = per_token * context * settings.max_sessions
    return max(per_token * context, min(wanted, int(psutil.virtual_memory().available * _CACHE_SHARE)))
