"""Snapshot of live objects for a checkpoint: written directly, or copied and written in background."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf.digests import FILES, Mark, listing, seal
from rlhf.processes import current
from rlhf.tasks.sampler import Stateful
from rlhf.training.backends.sharded import full_state, is_laid_out

#: Written last: a folder without it is no checkpoint.
STATE = "state.json"


@dataclass(frozen=True)
class Snapshot:
    """Parameters, and the state of optimiser, generator and live parts.

    Attributes:
        policy: whose model and tokenizer are written.
        weights: by name, where they are not those that the model holds.
        trainer: the content of `trainer.pt`.
    """

    policy: Any
    weights: Mapping[str, torch.Tensor] | None
    trainer: Mapping[str, Any]

    @classmethod
    def take(
        cls, policy: Any, optimizer: torch.optim.Optimizer | None, kept: Mapping[str, Stateful], *, copy: bool
    ) -> Snapshot | None:
        """Return the content of a checkpoint; None in a process that writes nothing. All processes call it together.

        Args:
            policy: to save.
            optimizer: None where the stage is over.
            kept: the live parts that remember something.
            copy: whether what is trained goes on while this is written. Copies lie in the memory of the CPU.
        """
        is_main, weights = current().is_main, None
        if copy or is_laid_out(policy.model):
            weights = full_state(policy.model, trained_only=policy.is_lora, keep=is_main)
        moments = optimizer.state_dict() if optimizer is not None else None
        remembered = {name: part.state_dict() for name, part in kept.items()}  # some ask the other processes
        if not is_main:
            return None
        trainer = {"optimizer": moments, "torch_rng": torch.get_rng_state(), "kept": remembered}
        return cls(policy, weights, _copied(trainer) if copy else trainer)

    def begin(self, folder: Path) -> None:
        """Write the tokenizer, and read its stop tokens: the rollouts use it, and no other thread may touch it."""
        folder.mkdir(parents=True)
        self.policy.name_stop_tokens()
        self.policy.tokenizer.save_pretrained(folder / "policy")

    def write(self, folder: Path, state: str, logs: Mapping[str, Mark]) -> None:
        """Write the rest: `state` is the text of `state.json`, `logs` the marks of the run's logs."""
        self.policy.save_model(folder / "policy", self.weights)
        torch.save(self.trainer, folder / "trainer.pt")
        seal(folder, logs, last=STATE, text=state)


def n_bytes(policy: Any, kept: Any) -> int:
    """Approximate bytes of a checkpoint: parameters, two moments per trained one, and parts' states."""
    parameters = list(policy.model.parameters())
    return _n_bytes(kept) + sum(int(p.nbytes) * (3 if p.requires_grad else 1) for p in parameters)


def _n_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return int(state.nbytes)
    inner = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return sum(map(_n_bytes, inner))


def _copied(value: Any) -> Any:
    """Copy of tensors and containers on the CPU; other values never change."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(inner) for inner in value)
    return value


def damage(folder: Path, hint: str = "") -> str | None:
    """Description of an incomplete checkpoint, after a kill or power loss; None if complete.

    Sizes tell; a checkpoint without the list of its files is taken for whole. What was changed later at its full size
    is found by `digests.verify`.

    Raises:
        CheckpointError: the list is not what was written; `hint` says what to do then.
    """
    try:
        found = listing(folder, hint)
        if found.marks is None and not isinstance(json.loads((folder / STATE).read_text()), Mapping):
            return f"{STATE} holds no state"
    except (OSError, ValueError) as error:
        return f"{STATE} or {FILES} cannot be read ({type(error).__name__})"
    for name, size in found.sizes.items():
        path = folder / name
        there = path.stat().st_size if path.is_file() else None
        if there is None:
            return f"{name} is missing"
        if there != size:
            return f"{name} has {there} bytes instead of {size}"
    return None
