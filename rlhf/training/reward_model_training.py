"""Reward-model training: models made from the policy, evaluated on held-out tasks, stored as ordinary folders."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rewards.models.model_folder import LEARNT
from rlhf.digests import Manifest
from rlhf.errors import ModelError, TrainingError, disk
from rlhf.processes import current
from rlhf.training.backends.sharded import device_of
from rlhf.training.policy.lora import Lora, unadapted
from rlhf.training.policy.model import Policy
from rlhf.training.policy.model_files import save_folder


class OfTask(Protocol):
    """Protocol of things that belong to a task."""

    @property
    def task_id(self) -> str:
        """Its task."""


Item = TypeVar("Item", bound=OfTask)


def split_by_task(items: Sequence[Item], share: float, seed: str) -> tuple[list[Item], list[Item]]:
    """Return training and held-out items, the latter of about `share` of the tasks.

    Raises:
        TrainingError: all are of one task.
    """
    tasks = sorted({item.task_id for item in items})
    if len(tasks) < 2:
        raise TrainingError(
            "a reward model needs training tasks and evaluation tasks, and there is only one task",
            where="held_out",
            got=f"{len(items)} of {len(tasks)} task",
            expected="at least two tasks",
            hint="raise pairs.tasks, or write pairs of more prompts",
        )
    random.Random(seed).shuffle(tasks)
    out = set(tasks[: min(max(round(share * len(tasks)), 1), len(tasks) - 1)])
    return [x for x in items if x.task_id not in out], [x for x in items if x.task_id in out]


def scoring_model(policy: Policy, objective: str = "pairwise") -> Any:
    """Sequence classifier with one output, a copy of the policy, adapters merged; its config keeps `objective`."""
    import transformers

    auto: Any = transformers.AutoModelForSequenceClassification
    backbone = copy.deepcopy(policy.model)
    backbone = unadapted(backbone) if policy.is_lora else backbone
    config = copy.deepcopy(backbone.config)
    config.num_labels, config.pad_token_id = 1, policy.tokenizer.pad_token_id
    setattr(config, LEARNT, objective)
    if type(config) not in auto._model_mapping:
        raise ModelError(
            "this model family has no sequence classifier for reward models",
            where="stages: reward_model",
            got=str(config.model_type),
            expected="a family with a sequence classifier in transformers",
            hint="train the reward model in a run of another family, with the same tokenizer",
        )
    model: Any = auto.from_config(config, dtype=backbone.dtype)
    setattr(model, model.base_model_prefix, getattr(backbone, backbone.base_model_prefix))
    model.set_attn_implementation("sdpa")
    model.requires_grad_(True)
    return model.to(device_of(policy.model))


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write the model as an ordinary folder, with the tokenizer of the rows that it reads."""
    with disk("the reward model", folder):
        save_folder(model, folder)
        tokenizer.save_pretrained(folder)


def save_in(run: Path, name: str, model: Any, tokenizer: Any) -> None:
    """Write the model as the folder `name` of a run, and list its files in the run's manifest."""
    save(run / name, model, tokenizer)
    if current().is_main:
        Manifest(run).record_all(name)


def left_by(index: int | None, reward: Any, run: Path) -> Any:
    """Return `reward` asking the model that stage `index` left in a run; as it is where it left none."""
    return reward if index is None else asking_left(reward, run / "reward_model" / f"{index}-reward_model")


def adapted(model: Any, lora: Lora | None) -> tuple[Any, Callable[[], Any]]:
    """Return a scoring model with adapters inside, and what merges them; itself without `lora`.

    The number that it says is trained in full.
    """
    if lora is None:
        return model, lambda: model
    wrapped = lora.wrap_scorer(model)
    return wrapped.get_base_model(), partial(unadapted, wrapped)


def asking_left(reward: Any, folder: Path) -> Any:
    """Return `reward` asking the model that a stage left in `folder`; its own where the stage left none."""
    return replace(reward, path=str(folder)) if folder.is_dir() else reward
