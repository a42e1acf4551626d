"""Memory estimate of each process of a run, before a model is loaded.

Weights, gradients, moments and copies are counted off the model's shapes and are exact. Activations and logits are
those of a micro-batch filled to its budget (`rlhf.estimate.dry_run`). Caches are bounds. What is alive at a time is
added up: what a stage holds throughout, the cache of the rollout before its updates, and the largest of what comes and
goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from agents.base import Capabilities
from agents.chat import ChatAgent
from agents.memory.full import FullHistory
from rlhf.errors import ModelError, RecipeError
from rlhf.estimate.auxiliary_models import beside, shapes_of
from rlhf.estimate.dry_run import Pass, peak_bytes
from rlhf.estimate.figures import Estimate, Part, total
from rlhf.estimate.meta import Parameter, config_of, count, dtype_of, meta_model, parameters_of, shaped
from rlhf.estimate.trainer_memory import alone, buffers, parts_on_host, trainer_bytes
from rlhf.inference.model_config import ModelConfig
from rlhf.inference.settings import VllmSettings, kv_bytes_per_token
from rlhf.losses.policy_loss import LossNeeds
from rlhf.training.backends.settings import DeepSpeed, Fsdp
from rlhf.training.backends.sharding import heads_problem, heads_rule, n_per_row_of, sharding_of
from rlhf.training.backends.token_stats import wanted_by
from rlhf.training.contrib.reference_reset import copies_adapter
from rlhf.training.critics.settings import CriticCapabilities
from rlhf.training.critics.value_model import backbone_of
from rlhf.training.policy.model import FromScratch, Pretrained
from rlhf.training.stages.pair_settings import PairStage
from rlhf.training.stages.policy_gradient import PolicyGradient
from rlhf.training.stages.reward_model import RewardModel
from rlhf.training.stages.supervised import Supervised

if TYPE_CHECKING:
    from rlhf.recipe import Recipe

_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def estimates(recipe: Recipe, n_processes: int = 1) -> list[Estimate]:
    """Return the estimate of each stage.

    Raises:
        ModelError: the configuration of a pretrained model cannot be read.
    """
    model, config = meta_model(recipe.policy)
    lora = recipe.policy.lora
    found = parameters_of(model, quantization=None if lora is None else lora.quantization)
    stages = enumerate(recipe.stages)
    return [_estimate(recipe.at(stage), f"stages[{i}]", stage, found, config, n_processes) for i, stage in stages]


def largest(found: Sequence[Estimate]) -> Estimate:
    """Return the estimate of the stage that needs most."""
    return max(found, key=lambda estimate: total(estimate.parts))


def _estimate(
    recipe: Recipe, path: str, stage: Any, parameters: Sequence[Parameter], config: Any, n_processes: int
) -> Estimate:
    dtype = precision_of(recipe, stage)
    _refuse_heads(path, n_per_row_of(stage.trainer), config.get_text_config())
    if sharding_of(stage.trainer).processes:
        parameters = [replace(p, size=_SIZES[dtype]) if p.size >= 1 else p for p in parameters]
    model, copied = _Model.of(config, dtype, recipe.policy.lora), list[Parameter]()
    if isinstance(stage, RewardModel):  # a copy, adapters merged, is trained beside the policy
        model = replace(model, lora=stage.lora)
        copied = model.parameters(below_head=True)
    trained = [*(replace(p, is_trained=False) for p in parameters), *copied] if copied else parameters
    kept = trainer_bytes(trained, stage.trainer, n_processes)
    on_host = parts_on_host(stage.trainer)
    counted, most = _kv_cache(recipe, stage, config, n_processes)
    held = [Part(name, kept[name], name in on_host) for name in ("weights", "gradients", "masters", "moments")]
    held.append(Part("buffers", buffers(parameters, stage.trainer, config)))
    held += _copies(recipe, stage, parameters, dtype)
    of_critic = _critic_model(recipe, stage)
    critic, critic_update = _critic(getattr(stage, "critic", None), of_critic)
    held.append(Part("critic", critic))
    undivided = trainer_bytes(trained, stage.trainer, 1)
    moments = undivided["masters"] + undivided["moments"]
    others = beside(recipe, stage, parameters, _SIZES[dtype], moments=moments, attempts=_episodes(recipe, stage) > 0)
    held += [Part(name, n, name == "background") for name, n in others.items()]
    cache = Part("kv_cache", counted)
    sleeps = not isinstance(recipe.engine, VllmSettings) and not recipe.asynchrony.is_on  # before every update
    held += [*(() if sleeps else (cache,)), Part("program", _program(), on_host=True)]
    asked = _pass_of(recipe, stage, config)
    # Once more without logits to speak of.
    peaks = [_dry(model, asked), _dry(model, replace(asked, n_sampled=1))]
    whole, bare = (peak or 0 for peak in peaks)
    loading = sum(p.n_bytes for p in copied)  # a classifier is drawn at random, and then given the copy
    if sharding_of(stage.trainer).parameters:
        loading = sum(p.n_bytes for p in parameters) - kept["weights"]
    passing = (
        (Part("activations", min(bare, whole)), Part("logits", max(whole - bare, 0))),
        (Part("critic_activations", _of_critic(stage, of_critic, asked)),),
        (Part("update", kept["update"], "moments" in on_host),),
        (Part("critic_update", critic_update),),
        (Part("loading", loading, on_host=True),),
        *(((cache,),) if sleeps else ()),
    )
    logits = asked.n_sampled, _SIZES[dtype] * int(config.get_text_config().vocab_size)
    kinds = isinstance(stage, PairStage), isinstance(stage, RewardModel)
    return Estimate(path, n_processes, tuple(held), passing, most, None not in peaks, logits, *kinds)


def _refuse_heads(path: str, n: int, text: Any) -> None:
    """Raise RecipeError where `n` processes cannot share the attention heads of a model."""
    heads = text.num_attention_heads, text.num_key_value_heads
    problem = heads_problem(n, *heads) if n > 1 else None
    if problem:
        raise RecipeError(
            "the attention heads are not divisible by this number of processes",
            where=f"{path}.trainer.sequence_parallel",
            got=f"{n}, and {problem}",
            expected=heads_rule(*heads),
        )


def precision_of(recipe: Recipe, stage: Any) -> str:
    """Number format that the stage computes in."""
    own = stage.trainer.precision if isinstance(stage.trainer, DeepSpeed | Fsdp) else None
    return own or dtype_of(recipe.policy)


# --- copies of the policy and models beside it ---------------------------------------------------------------------


def _copies(recipe: Recipe, stage: Any, parameters: Sequence[Parameter], dtype: str) -> Iterator[Part]:
    n, n_trained = count(parameters)
    lora, own = recipe.policy.lora is not None, stage if isinstance(stage, PolicyGradient) else None
    reference = 0
    if own is not None and LossNeeds(own.loss).needs_ref:
        reference = n * _SIZES[dtype] if not lora else 0
        if lora and copies_adapter(recipe.stages, own):
            reference = sum(p.n_bytes for p in parameters if p.is_trained)
    yield Part("reference", reference)
    yield Part("teacher", _teacher(recipe, own and own.loss, n, dtype))
    yield Part("engine", _engine(recipe, n - n_trained if lora else n, dtype))
    versions = 0
    if own is not None and own.opponents is not None:  # that of the stage's begin, and one every so many steps
        versions = min(own.opponents.keep, 1 + own.steps // own.opponents.every)
    yield Part("opponents", versions * sum(p.n_bytes for p in parameters if p.is_trained), on_host=True)


def _teacher(recipe: Recipe, loss: Any, n_parameters: int, dtype: str) -> int:
    path = LossNeeds(loss).teacher
    if path is None:
        return 0
    found = shapes_of(path, recipe.policy)
    return (n_parameters if found is None else count(found)[0]) * _SIZES[dtype]


def _critic_model(recipe: Recipe, stage: Any) -> _Model | None:
    """Model that a critic computes with; None where it has none or nothing is known of it."""
    critic: Any = stage.critic if isinstance(stage, PolicyGradient) else None
    if CriticCapabilities(critic).trains_backbone is None:
        return None
    config = None
    if critic.path is not None:
        with suppress(ModelError):  # not to be had now: as large as the policy
            config = config_of(Pretrained(path=critic.path))
    lora = recipe.policy.lora if critic.backbone == "policy" else critic.lora
    return _Model.of(config or config_of(recipe.policy), dtype_of(recipe.policy), lora)


def _critic(critic: Any, model: _Model | None) -> tuple[int, int]:
    """Bytes of a critic and of an update: its backbone, and what its trainer keeps; its head is negligible."""
    if model is None:
        return 0, 0
    declared, shares = CriticCapabilities(critic), critic.backbone == "policy"
    parameters = model.parameters(below_head=declared.privileged_text is None)
    if not critic.trains_backbone:
        parameters = [replace(p, is_trained=False) for p in parameters]
    kept = alone(parameters)
    # A shared backbone keeps gradients in the policy's place, one after the other, and the rest of its own.
    held = sum(kept[name] for name in ("masters", "moments", *([] if shares else ["weights", "gradients"])))
    if declared.tau is not None:  # and a copy in float32, which follows it slowly
        held += 4 * count(parameters)[1]
    elif declared.privileged_text is not None and critic.lora is None:
        held += kept["weights"]  # and what it began as, which adapters have below them
    return held, kept["update"]


def _engine(recipe: Recipe, n_parameters: int, dtype: str) -> int:
    """Bytes of the engine's own copy of the weights.

    The embedded one has none unless the policy is taken to pieces; that of servers lies with them.
    """
    from rlhf.recipe.view import copies_policy

    engine = recipe.engine
    if samples_elsewhere(recipe):
        return 0
    if not isinstance(engine, VllmSettings):
        return n_parameters * _SIZES[dtype] if copies_policy(recipe) else 0
    return n_parameters * _engine_size(recipe, dtype) // engine.tensor_parallel


def samples_elsewhere(recipe: Recipe) -> bool:
    """True if servers sample, which have memory of their own."""
    return recipe.cluster.is_on or bool(isinstance(recipe.engine, VllmSettings) and recipe.engine.servers)


def _engine_size(recipe: Recipe, dtype: str) -> int:
    """Bytes of one number in the engine."""
    return _SIZES.get(recipe.engine.dtype if isinstance(recipe.engine, VllmSettings) else "auto", _SIZES[dtype])


def _kv_cache(recipe: Recipe, stage: Any, config: Any, n_processes: int) -> tuple[int, int]:
    """Bytes of the KV cache in each process: the counted ones and the upper bound.

    The bound has every live episode fill its context. Where nothing but the model's own size limits that, only what
    episodes sample is counted.
    """
    engine, limits = recipe.engine, recipe.limits
    text = config.get_text_config()
    if samples_elsewhere(recipe):
        return 0, 0
    if isinstance(engine, VllmSettings) and engine.kv_cache_gb is not None:
        return int(engine.kv_cache_gb * 1e9), int(engine.kv_cache_gb * 1e9)
    in_fp8 = isinstance(engine, VllmSettings) and engine.kv_cache_dtype == "fp8"
    per_token = kv_bytes_per_token(text, 1 if in_fp8 else _engine_size(recipe, dtype_of(recipe.policy)))
    if isinstance(engine, VllmSettings):  # whose parts hold the heads of keys and values that are theirs
        per_token //= min(engine.tensor_parallel, ModelConfig(text).n_key_value_heads)
    context = limits.max_context or text.max_position_embeddings
    sessions = min(engine.max_sessions, limits.max_concurrent)
    most = per_token * context * sessions
    n_episodes = _episodes(recipe, stage)
    if not n_episodes:  # its update comes before any rollout
        return 0, most
    episodes = -(-n_episodes // n_processes)
    return per_token * _length(recipe, context) * min(sessions, episodes), most


def _length(recipe: Recipe, context: int) -> int:
    """Tokens of a row: the context where a recipe or its policy sets one, else what an episode samples at most."""
    limits = recipe.limits
    is_bounded = limits.max_context is not None or isinstance(recipe.policy, FromScratch)
    return context if is_bounded else min(context, limits.max_turns * limits.max_tokens)


def _episodes(recipe: Recipe, stage: Any) -> int:
    """Most attempts sampled at a time, before the updates of a stage or step or ahead of them; 0 where none are."""
    if isinstance(stage, PairStage):
        return stage.pairs.tasks * stage.pairs.group_size if stage.pairs.is_attempted else 0
    if isinstance(stage, Supervised):
        return (
            stage.rejection_sampling.tasks_per_round * stage.rejection_sampling.group_size
            if stage.rejection_sampling
            else 0
        )
    n_steps = 1 + (recipe.asynchrony.steps_ahead if recipe.asynchrony.is_on else 0)
    return int(min(n_steps, stage.steps) * stage.tasks_per_step * stage.group_size)


# --- what comes and goes ---------------------------------------------------------------------------------------------


def _pass_of(recipe: Recipe, stage: Any, config: Any) -> Pass:
    """Largest micro-batch of a stage: its token budget, a row that is longer, or a smaller minibatch."""
    limits = recipe.limits
    context = limits.max_context or config.get_text_config().max_position_embeddings
    loss = None
    if isinstance(stage, Supervised):
        n_trajectories, reads_all = stage.batch_size, stage.observation_weight > 0
    elif isinstance(stage, PairStage):  # two rows each, padded to one length; a model of single attempts reads one
        is_single = isinstance(stage, RewardModel) and stage.objective != "pairwise"
        n_trajectories, reads_all = stage.at_once * (1 if is_single else 2), False
    else:
        loss, reads_all = stage.loss, False
        n_trajectories = -(-stage.tasks_per_step * stage.group_size // stage.minibatches)
    if isinstance(stage, PairStage):
        n_tokens = n_trajectories * _length(recipe, context)
    else:  # a row that is longer than the budget has a micro-batch of its own; of a file's rows nothing is known
        row = 0 if stage.reads_file else _length(recipe, context)
        n_tokens = min(max(stage.max_tokens_per_microbatch, row), n_trajectories * _most_rows(recipe, stage) * context)
    n_calls = limits.max_turns * most_calls(recipe)
    n_sampled = n_tokens if reads_all else min(n_tokens, n_trajectories * n_calls * limits.max_tokens)
    if isinstance(stage, RewardModel):  # a number a row, and no logits
        n_sampled = 1
    return Pass(
        n_tokens,
        n_sampled,
        frozenset(wanted_by(loss)) if loss is not None else frozenset(),
        bool(LossNeeds(loss).needs_ref),
        stage.trainer.gradient_checkpointing,
        n_per_row_of(stage.trainer),
    )


def _most_rows(recipe: Recipe, stage: Any) -> int:
    """Most rows of a trajectory: one where each prompt extends the one before it, else one of each call."""
    agent, is_folded = recipe.agent, not isinstance(stage, PolicyGradient) or stage.layout == "trajectory"
    extends = isinstance(agent, ChatAgent) and isinstance(agent.memory, FullHistory)
    return 1 if stage.reads_file or (is_folded and extends) else recipe.limits.max_turns * most_calls(recipe)


def most_calls(recipe: Recipe) -> int:
    """Most calls of the policy in a turn: what limits allow where an agent says that it calls in several roles."""
    return recipe.limits.max_generations_per_turn if len(Capabilities(recipe.agent).roles) > 1 else 1


def _of_critic(stage: Any, model: _Model | None, asked: Pass) -> int:
    """Bytes of a critic's activations where it trains a backbone; it does not recompute them."""
    if model is None or not stage.critic.trains_backbone:
        return 0
    # One that is told more scores tokens, as the policy does; others read a number off hidden states.
    n_sampled = 1 if CriticCapabilities(stage.critic).privileged_text is None else asked.n_sampled
    own = Pass(asked.n_tokens, n_sampled)
    return _dry(model, own) or 0


@dataclass(frozen=True)
class _Model:
    """A model before its weights are read; passes of equal ones need the same memory."""

    key: str
    dtype: str
    lora: Any
    config: Any = field(compare=False)

    @classmethod
    def of(cls, config: Any, dtype: str, lora: Any) -> _Model:
        """Model of a configuration, in a number format, with adapters or None."""
        return cls(config.to_json_string(), dtype, lora, config)

    def parameters(self, *, below_head: bool) -> list[Parameter]:
        """Shapes, without the output layer or with it."""
        model = shaped(self.config, self.dtype, self.lora)
        return parameters_of(backbone_of(model) if below_head else model)


@lru_cache(maxsize=64)
def _dry(model: _Model, asked: Pass) -> int | None:
    return peak_bytes(model.config, partial(shaped, dtype=model.dtype, lora=model.lora), asked)


def _program() -> int:
    """Bytes of interpreter and libraries: those of this process, which has loaded them too."""
    import psutil

    return int(psutil.Process().memory_info().rss)
