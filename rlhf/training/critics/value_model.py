"""Critic models: a transformer without its output layer, and a linear value head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from rlhf.checking import CheckContext, Problem, no_model
from rlhf.data import Task
from rlhf.inference.embedded.attention import use_packed_attention
from rlhf.inference.model_config import ModelConfig
from rlhf.settings import STRICT
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.sharding import unscaled
from rlhf.training.critics.settings import CriticCapabilities
from rlhf.training.policy.lora import causal_of, no_base
from rlhf.training.policy.model import Lora, Policy
from rlhf.training.policy.model_files import check_context_of, check_tokens, load_folder


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CriticModelSettings:
    """Settings of a critic that may have a model of its own."""

    path: str | None = None
    """For a separate model: folder or hub name of the causal language model to initialise from, or `base`. null copies
    the policy at the stage's start; with adapters, its base model."""
    lora: Lora | None = None
    """For a separate model: train adapters instead of all weights."""
    optimizer: AdamW = Field(default_factory=lambda: AdamW(lr=1e-5))
    """Optimizer of the critic."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Critic warm-up: steps at the start of the stage in which only the critic is updated."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a folder without a model, and a copy of a quantised base."""
        if self.path is not None:
            do = "remove the key: the critic then begins as a copy of the policy"
            yield from no_model(self.path, context.at("path"), do)
        lora = context.recipe.policy.lora
        if lora is not None and lora.quantization is not None and self.copies_policy:
            whose, expected = f"{context.path}, a copy of that base", "critic.path, or critic.backbone: policy"
            yield no_base("policy.lora.quantization", lora.quantization, whose, expected)

    @property
    def copies_policy(self) -> bool:
        """True if the model begins as a copy of the policy's."""
        return self.path is None

    def begun(self, policy: Policy, start: Path | None) -> Any:
        """Return the causal language model that it begins as, without adapters; as `backbone_for` otherwise."""
        return self._copied(policy, start) if self.path is None else self._loaded(self.path, policy)

    def adapted(self, model: Any, seed: int) -> Any:
        """Return `model` with the adapters that are asked for, drawn from `seed`, prepared for packed rows."""
        if self.lora is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = self.lora.wrap(model)
        use_packed_attention(model)
        return model

    def _copied(self, policy: Policy, start: Path | None) -> Any:
        if policy.is_lora:
            return copy.deepcopy(policy.model).unload()  # the model under the adapters never moves
        if start is None:
            return copy.deepcopy(policy.model)
        return load_folder(str(start / "policy"), dtype=_dtype(policy))[0]

    def _loaded(self, path: str, policy: Policy) -> Any:
        where = f"critic.path {path}"
        model, tokenizer = load_folder(path, dtype=_dtype(policy), where=where)
        check_tokens(tokenizer, policy.tokenizer, where)
        return model


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ValueHeadSettings(CriticModelSettings):
    """Settings of a critic with a value head on a transformer, its own or the policy's."""

    backbone: Literal["own", "policy"] = "own"
    """Transformer below the value head: a separate model, or the policy's, with shared weights."""
    gradient: Literal["backbone", "head"] | None = None
    """Layers trained by the value loss: head and backbone, or the head alone. null is backbone for a separate model,
    and head for the policy's."""
    head_lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate of the value head, which is initialised at 0; null is `optimizer.lr`."""

    def __post_init__(self) -> None:
        if self.backbone == "policy" and (self.path is not None or self.lora is not None):
            raise ValueError("path and lora have no effect with backbone: policy; remove them")
        if not self.trains_backbone and self.lora is not None:
            raise ValueError("lora has no effect with gradient: head; remove it")
        if not self.trains_backbone and self.head_lr is not None:
            raise ValueError("head_lr has no effect where the head alone is trained; set optimizer.lr")

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse, too, to train a transformer of its own in float16."""
        yield from super().check(context)
        if self.backbone == "own" and self.trains_backbone:
            yield from unscaled(f"{context.path}, whose transformer is trained", context)

    @property
    def copies_policy(self) -> bool:
        """True if the model begins as a copy of the policy's."""
        return self.path is None and self.backbone == "own"

    @property
    def trains_backbone(self) -> bool:
        """True if the value loss trains the backbone."""
        return (self.gradient or ("backbone" if self.backbone == "own" else "head")) == "backbone"

    def backbone_for(self, policy: Policy, start: Path | None, seed: int) -> nn.Module:
        """Return the backbone before the first update, prepared for packed rows.

        Args:
            policy: the live one.
            start: folder of the checkpoint of the stage's begin, where the policy has moved since; None where it
                stands there.
            seed: draws the adapter's weights.

        Raises:
            ModelError: the model of `path` cannot be loaded or reads other tokens.
        """
        if self.backbone == "policy":
            return backbone_of(policy.model)
        model = self.begun(policy, start)
        model.requires_grad_(self.trains_backbone)
        return backbone_of(self.adapted(model, seed))

    def value_model(self, policy: Policy, start: Path | None, seed: int) -> ValueModel:
        """Return a model of one value a place before its first update: every value is 0. See `backbone_for`."""
        backbone = self.backbone_for(policy, start, seed)
        model = ValueModel(backbone, shared=self.backbone == "policy", trains_backbone=self.trains_backbone)
        return model.to(next(policy.model.parameters()).device)


def _dtype(policy: Policy) -> str:
    return str(policy.model.dtype).removeprefix("torch.")


def backbone_of(model: Any) -> nn.Module:
    """The transformer below the output layer of a causal language model; adapters stay inside."""
    backbone: nn.Module = causal_of(model).get_decoder()
    return backbone


def check_contexts(
    critics: Mapping[str, tuple[object, Callable[[], Sequence[Task]]]], tokenizer: Any, max_context: int
) -> None:
    """Raise ModelError where rows of `max_context` tokens are too long for the model that a critic begins as.

    Args:
        critics: YAML path -> settings, and what lists the tasks that it may be given privileged text of; those without
            a model of their own `path` are left out.
        tokenizer: of the policy.
        max_context: of the policy; privileged text comes before.
    """
    for place, (critic, tasks) in critics.items():
        if isinstance(critic, CriticModelSettings) and critic.path is not None:
            ids_of, where = CriticCapabilities(critic).privileged_ids, f"{place}.path {critic.path}"
            n_told = max((len(ids_of(task, tokenizer)) for task in tasks()), default=0) if ids_of else 0
            told = f", with {n_told} tokens of privileged_text before a row of {max_context}" if n_told else ""
            check_context_of(critic.path, max_context + n_told, where + told)


class PartialCheckpointModule(nn.Module):
    """A module whose checkpoints hold its trained parameters only."""

    def kept(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters by name, which no other checkpoint has."""
        return ((name, p) for name, p in self.named_parameters() if p.requires_grad)

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Take what `kept` gave from a checkpoint. Raises ValueError for the state of another model."""
        own = dict(self.kept())
        shapes, theirs = ({name: tuple(p.shape) for name, p in given.items()} for given in (own, saved))
        if shapes != theirs:
            differing = sorted(set(shapes.items()) ^ set(theirs.items()))[0]
            raise ValueError(f"the critic of this checkpoint is another model: {differing[0]}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(saved[name])


class BackboneModel(PartialCheckpointModule):
    """A backbone, and a head on its last hidden states: subclasses set `head`.

    Args:
        backbone: prepared by `use_packed_attention`.
        shared: the backbone is the policy's. It is then no submodule: its weights are the policy's to save.
        trains_backbone: whether the gradient goes on into the backbone.
    """

    head: nn.Module

    def __init__(self, backbone: Any, *, shared: bool, trains_backbone: bool) -> None:
        super().__init__()
        self.shared, self.trains_backbone = shared, trains_backbone
        self.holds_backbone = False
        self._policys = [backbone] if shared else []
        self.own = None if shared else backbone

    @property
    def backbone(self) -> Any:
        """The transformer."""
        return self._policys[0] if self.shared else self.own

    @property
    def config(self) -> Any:
        """Of the backbone."""
        return self.backbone.config

    def trained_backbone(self) -> list[nn.Parameter]:
        """Parameters of the backbone that the value loss trains."""
        return [p for p in self.backbone.parameters() if p.requires_grad] if self.trains_backbone else []

    def train(self, mode: bool = True) -> Self:
        """Set training mode as any module; a frozen backbone stays in evaluation mode, without dropout."""
        super().train(mode)
        self.backbone.train(mode and self.trains_backbone and not self.holds_backbone)
        return self

    def states(self, places: Tensor, **inputs: Any) -> Tensor:
        """Last hidden states in float32, `[N, d]`, at `places` `[N]` of the packed rows."""
        moves = self.trains_backbone and not self.holds_backbone
        with nullcontext() if moves else torch.no_grad():
            hidden: Tensor = self.backbone(**inputs).last_hidden_state[0]
        return hidden[places].float()


class ValueModel(BackboneModel):
    """Reads one number off the last hidden state of each place.

    A drop-in for `rlhf.inference.embedded.attention.packed_forward`. The head is float32, and 0 at first: a critic that
    has seen nothing expects nothing.
    """

    head: nn.Linear

    def __init__(self, backbone: Any, *, shared: bool, trains_backbone: bool) -> None:
        super().__init__(backbone, shared=shared, trains_backbone=trains_backbone)
        self.head = nn.Linear(backbone.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, *, logits_to_keep: Tensor, **inputs: Any) -> Any:
        """Values `[1, N, 1]`, as `logits`, at places `logits_to_keep` `[N]` of the packed rows."""
        # A row that fills the context has one token more here, which no value sees (`value_rows`): a model that learnt
        # its positions has none for it, and with longrope it would change those of all others.
        found, at = ModelConfig(self.config).text, inputs["position_ids"]
        n_positions = found.max_short_positions or found.max_position_embeddings
        inputs["position_ids"] = at if n_positions is None else at.masked_fill(at == n_positions, n_positions - 1)
        return SimpleNamespace(logits=self.head(self.states(logits_to_keep, **inputs))[None])
