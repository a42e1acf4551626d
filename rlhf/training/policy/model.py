"""The policy: a causal language model with its tokenizer, from a folder, a hub, or from scratch."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.device import present
from rlhf.errors import CheckpointError, ModelError
from rlhf.inference.embedded.attention import use_packed_attention
from rlhf.inference.embedded.model_probe import check_rows
from rlhf.inference.embedded.swapped_weights import having, held_by
from rlhf.inference.role_adapters import adapter_names, adapter_of, role_adapters
from rlhf.processes import current
from rlhf.rollout.renderer import Renderer
from rlhf.settings import STRICT
from rlhf.training.backends.compiled import decoder_layers, recomputed_layers
from rlhf.training.backends.master_weights import is_short
from rlhf.training.backends.sharded import device_of, full_state, is_laid_out
from rlhf.training.checkpoints.store import check_model, way_out_of
from rlhf.training.policy.lora import Lora as Lora
from rlhf.training.policy.lora import load_adapters
from rlhf.training.policy.model_files import Loader, base_or, first_line, load_folder, save_folder
from rlhf.training.policy.tokenizer import train_tokenizer


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FromScratch:
    """A small model built in seconds, with a tokenizer trained on the environment's text. Saved like any other."""

    #: The tokenizer is trained on the environment's text.
    needs_texts: ClassVar[bool] = True

    family: Literal["qwen3", "llama"] = "qwen3"
    """Architecture."""
    hidden_size: Annotated[int, Field(ge=8)] = 128
    """Width of the model."""
    intermediate_size: Annotated[int, Field(ge=8)] | None = None
    """Width of the feed-forward layers; None is three times `hidden_size`."""
    n_layers: Annotated[int, Field(ge=1)] = 4
    """Blocks of attention and feed-forward layer."""
    n_heads: Annotated[int, Field(ge=1)] = 4
    """Attention heads."""
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] = 32
    """Width of one attention head; vLLM on a CPU takes 32, 64, 80, 96, 112 and 128."""
    n_kv_heads: Annotated[int, Field(ge=1)] | None = None
    """Key-value heads, which divide `n_heads`; None is as many as `n_heads`."""
    vocab_size: Annotated[int, Field(ge=300)] = 2048
    """Most tokens the tokenizer may learn."""
    split_digits: bool = False
    """Make each digit a token of its own, for worlds in which numbers are computed with."""
    max_context: Annotated[int, Field(ge=16)] = 1024
    """Maximum context length: prompt and generation together."""
    initializer_range: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.02
    """Standard deviation of the initial weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights, initialised in float32; the optimizer keeps float32 masters."""
    lora: Lora | None = None
    """Train adapters instead of all weights."""

    def __post_init__(self) -> None:
        if self.n_heads % (self.n_kv_heads or self.n_heads):
            raise ValueError("n_heads must be a multiple of n_kv_heads")

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse limits that go beyond the context, or fill it."""
        limits = context.recipe.limits
        if limits.max_context and limits.max_context > self.max_context:
            yield Problem(
                "the limit is longer than the policy's context",
                where="limits.max_context",
                got=str(limits.max_context),
                expected=f"at most policy.max_context = {self.max_context}",
                do="lower it, or raise policy.max_context",
            )
        if not limits.max_context:
            yield from limits.unprompted(self.max_context)
        for i, own in enumerate(stage.limits for stage in context.recipe.stages):
            if own is not None and not own.max_context:
                yield from own.unprompted(self.max_context, f"stages[{i}].limits")

    def tokenizer(self, texts: Iterable[str]) -> Any:
        """A tokenizer trained on `texts`."""
        return train_tokenizer(
            texts, vocab_size=self.vocab_size, max_context=self.max_context, split_digits=self.split_digits
        )

    def build(self, seed: int, texts: Iterable[str] = ()) -> Policy:
        """Train the tokenizer on `texts` and draw the weights from `seed`."""
        from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

        tokenizer = self.tokenizer(texts)
        common: dict[str, Any] = {
            "vocab_size": len(tokenizer),
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size or 3 * self.hidden_size,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads or self.n_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_context,
            "tie_word_embeddings": True,
            "initializer_range": self.initializer_range,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        config = Qwen3Config(**common) if self.family == "qwen3" else LlamaConfig(**common)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        for parameter in model.parameters():  # and no buffer: a model that is loaded has those in float32
            parameter.data = parameter.data.to(getattr(torch, self.dtype))
        base = copy.deepcopy(model) if self.lora is not None else None
        policy = Policy.of(model, tokenizer, self.lora)
        policy.base = base
        return policy


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Pretrained:
    """Any causal language model in Hugging Face format: a local folder, or a name on a hub."""

    #: The tokenizer comes with the model.
    needs_texts: ClassVar[bool] = False

    path: str
    """Model folder or hub name, such as Qwen/Qwen3-0.6B; `base` is the shipped small model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the weights."""
    template: Path | None = None
    """Chat template that sets or replaces the model's own: `plain`, `chatml`, or the path of a Jinja file."""
    chat_template_kwargs: dict[str, bool | str | int] = Field(default_factory=dict)
    """Passed to the tokenizer's chat template, e.g. {enable_thinking: false}."""
    lora: Lora | None = None
    """Train adapters instead of all weights."""

    def __post_init__(self) -> None:
        """Find the model that comes along."""
        object.__setattr__(self, "path", base_or(self.path))

    def build(self, seed: int, texts: Iterable[str] = (), *, loader: Loader | None = None) -> Policy:
        """Load model and tokenizer; `seed` draws the adapter's weights."""
        torch.manual_seed(seed)
        quantization = self.lora.quantization if self.lora else None
        model, tokenizer = load_folder(
            self.path, dtype=self.dtype, quantization=quantization, template=self.template, loader=loader
        )
        return Policy.of(model, tokenizer, self.lora, self.chat_template_kwargs)


@plain_dataclass
class Policy:
    """A live policy. The rollout engine and the trainer share `model`.

    `load` is what has read its weights in pieces, which then stay so (`rlhf.training.policy.sharded_load`); else None.
    """

    model: Any
    tokenizer: Any
    chat_template_kwargs: dict[str, Any]
    is_lora: bool
    version: int = 0
    reference: Any = None
    base: Any = None
    load: Any = None

    @classmethod
    def of(cls, model: Any, tokenizer: Any, lora: Lora | None, template: dict[str, Any] | None = None) -> Policy:
        """Switch the model to packed attention and wrap it with adapters where asked."""
        if lora is not None:
            model = lora.wrap(model)
        use_packed_attention(model)
        check_rows(model)
        model.eval()
        return cls(model, tokenizer, dict(template or {}), lora is not None)

    @property
    def max_context(self) -> int:
        """Positions the model was made for."""
        return int(self.model.config.max_position_embeddings)

    @property
    def n_parameters(self) -> int:
        """All parameters, frozen ones included."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def compiles_well(self) -> bool:
        """True if torch.compile speeds this model up: on a GPU, in 16 bits, one adapter."""
        first = next(self.model.parameters())
        is_plain = role_adapters(self.model) is None and getattr(self.model, "quantization_method", None) is None
        return bool(first.is_cuda and is_short(first) and is_plain and present().has_triton)

    def recompute(self, on: bool | float) -> None:
        """Have training compute activations again in its backward pass instead of keeping them, or not any more.

        Args:
            on: whether, or for what share of the layers.
        """
        model = self.model.get_base_model() if self.is_lora else self.model
        if not on:
            model.gradient_checkpointing_disable()
            return
        try:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except ValueError as error:
            raise ModelError(
                "this model does not support gradient checkpointing",
                where="trainer.gradient_checkpointing",
                got=str(error).splitlines()[0],
                expected="false",
            ) from error
        layers: list[Any] = decoder_layers(model)
        for layer, again in zip(layers, recomputed_layers(len(layers), float(on)), strict=True):
            layer.gradient_checkpointing = again

    def keep_reference(self, folder: Path) -> None:
        """Keep the policy of a checkpoint, frozen, for KL terms.

        Of adapters only these are copied. Untrained ones add nothing: the base is the reference, without a copy.

        Raises:
            CheckpointError: the folder has no policy of this kind, or a file of it is not what was written.
        """
        if self.is_lora:
            self.reference = _adapter_weights(self.model, folder / "policy")
        else:
            dtype = str(self.model.dtype).removeprefix("torch.")
            self.reference, _ = load_folder(str(folder / "policy"), dtype=dtype)
            self.reference.requires_grad_(False).to(device_of(self.model)).eval()
            use_packed_attention(self.reference)

    @contextmanager
    def as_reference(self) -> Iterator[Any]:
        """The reference model, for a forward pass without gradient."""
        with torch.no_grad():
            if self.is_lora:
                was_training = self.model.training
                self.model.eval()
                kept = self.reference
                try:
                    with self.model.disable_adapter() if kept is None else having(held_by(self.model, kept)):
                        yield self.model
                finally:
                    self.model.train(was_training)
            else:
                if self.reference is None:
                    raise ModelError(
                        "there is no reference model", where="Policy.as_reference", hint="call keep_reference"
                    )
                yield self.reference

    def save_base(self, run_folder: Path) -> None:
        """Keep the weights under an adapter that were made from scratch: no other copy of them exists."""
        if self.base is not None:
            folder = run_folder.resolve() / "base"
            if current().is_main:
                save_folder(self.base, folder)
                self.tokenizer.save_pretrained(folder)
            self.base = None
            for settings in self.model.peft_config.values():
                settings.base_model_name_or_path = str(folder)

    def save(self, folder: Path) -> None:
        """Write an ordinary Hugging Face folder (an adapter: a PEFT folder with its base's name).

        Where parameters lie in pieces all processes call this together; the first one writes.
        """
        is_main = current().is_main
        whole = full_state(self.model, trained_only=self.is_lora, keep=is_main) if is_laid_out(self.model) else None
        if is_main:
            self.name_stop_tokens()
            self.save_model(folder, whole)
            self.tokenizer.save_pretrained(folder)

    def save_model(self, folder: Path, weights: Mapping[str, torch.Tensor] | None) -> None:
        """Write the model (an adapter: that alone) in this process: `weights` by name, or where None those it holds."""
        given: dict[str, Any] = {} if weights is None else {"state_dict": weights}
        if self.is_lora:  # which asks the hub for the base's configuration else
            given["save_embedding_layers"] = False
        save_folder(self.model, folder, **given)

    def name_stop_tokens(self) -> None:
        """Name every token that ends a reply in the model's generation config, as the end of a turn may not be EOS."""
        config = self.model.generation_config
        kwargs = self.chat_template_kwargs
        ids = Renderer(self.tokenizer, chat_template_kwargs=kwargs, generation_config=config).stop_ids
        config.eos_token_id = ids[0] if len(ids) == 1 else list(ids)


def restore(
    settings: FromScratch | Pretrained, saved: Path, run_folder: Path, *, loader: Loader | None = None
) -> Policy:
    """The policy of a checkpoint's `policy` folder: full weights, or an adapter over its base.

    Raises:
        CheckpointError: the folder cannot be read.
        ModelError: the base under an adapter cannot be read.
    """
    template = settings.chat_template_kwargs if isinstance(settings, Pretrained) else {}
    dtype = settings.dtype
    is_lora = (saved / "adapter_config.json").is_file()
    if is_lora:
        check_model(saved)
        source = settings.path if isinstance(settings, Pretrained) else str(run_folder / "base")
        quantization = settings.lora.quantization if settings.lora else None
        own = settings.template if isinstance(settings, Pretrained) else None
        base, tokenizer = load_folder(source, dtype=dtype, quantization=quantization, template=own, loader=loader)
    try:
        model = load_adapters(base, saved) if is_lora else None
        if model is None:
            model, tokenizer = load_folder(str(saved), dtype=dtype, where=str(saved), loader=loader)
    except ModelError as error:
        raise _unusable(saved, f"{error.what}: {error.got}", error.expected) from error
    policy = Policy.of(model, tokenizer, None, template)
    policy.is_lora = is_lora
    return policy


def resume(
    settings: FromScratch | Pretrained, saved: Path, run_folder: Path, *, loader: Loader | None = None
) -> Policy:
    """`restore`, to go on with the training of what `settings` describe; another model is a CheckpointError."""
    policy = restore(settings, saved, run_folder, loader=loader)
    wanted: dict[str, Any] = {"an adapter": settings.lora is not None}
    found: dict[str, Any] = {"an adapter": policy.is_lora}
    if settings.lora is not None and policy.is_lora:
        wanted["adapters of roles"] = sorted(settings.lora.roles)
        found["adapters of roles"] = list(adapter_names(policy.model)[1:])
    if isinstance(settings, FromScratch):
        names = {"hidden_size": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
        names |= {"head_dim": "head_dim"}
        wanted |= {"family": settings.family} | {name: getattr(settings, name) for name in names}
        config = policy.model.config
        found |= {"family": config.model_type} | {name: getattr(config, theirs) for name, theirs in names.items()}
    differing = [name for name in wanted if wanted[name] != found[name]]
    if differing:
        got, expected = (", ".join(f"{name} {values[name]}" for name in differing) for values in (found, wanted))
        raise _unusable(saved, f"another model: {got}", f"the recipe's policy: {expected}")
    return policy


def _adapter_weights(model: Any, saved: Path) -> dict[str, torch.Tensor] | None:
    """Weights of the adapter in a folder, by name and device of `model`'s trained parameters; None if untrained."""
    from safetensors.torch import load_file

    check_model(saved)
    try:
        found = {
            (role, name): tensor
            for role in adapter_names(model)
            for name, tensor in load_file(saved / role / "adapter_model.safetensors").items()
        }
        if not any(bool(tensor.any()) for (_, name), tensor in found.items() if ".lora_B." in name):
            return None  # B = 0, as it is drawn
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return {name: found[adapter_of(name) or "", _name_in_file(name)].to(p) for name, p in trained.items()}
    except Exception as error:  # safetensors raises one of its own
        raise _unusable(saved, first_line(error), "the adapter that is the reference") from error


def _name_in_file(name: str) -> str:
    """Parameter name in PEFT's file: without the adapter's name, and DoRA's magnitude suffix."""
    name = re.sub(r"(\.lora_\w+)\.[^.]+", r"\1", name)
    return name.removesuffix(".weight") if name.endswith(".lora_magnitude_vector.weight") else name


def _unusable(saved: Path, got: str, expected: str) -> CheckpointError:
    return CheckpointError(
        "the policy of this checkpoint cannot be used",
        where=str(saved),
        got=got,
        expected=expected,
        hint=way_out_of(saved) or "give another checkpoint",
    )
