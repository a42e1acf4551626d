"""Checkpoints: the policy as an ordinary model folder, everything else beside it, written atomically.

    checkpoints/2-policy_gradient-000040/
        policy/        model (or adapter) and tokenizer in Hugging Face format
        trainer.pt     optimiser state, and the policy's generator states
        state.json     where the run stands; written last

A folder without `state.json` is not a checkpoint. Randomness elsewhere is a pure function of (seed, stage, step), so
nothing more is needed for a resumed run to equal an uninterrupted one.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlhf.errors import CheckpointError


@dataclass(frozen=True)
class State:
    """Where a run stands.

    Attributes:
        stage: index of the stage in the recipe.
        stage_kind: its kind, for the reader.
        step: steps of this stage that are finished.
        finished: whether the stage is complete.
        policy_version: publications so far.
        n_updates: optimiser updates of this stage.
        n_episodes: training episodes of the whole run.
        train_s: seconds spent in training stages, evaluations excluded.
        results: evaluations so far, by name.
    """

    stage: int
    stage_kind: str
    step: int
    finished: bool
    policy_version: int
    n_updates: int = 0
    n_episodes: int = 0
    train_s: float = 0.0
    results: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name of the stage in metrics and trajectory files."""
        return f"{self.stage}-{self.stage_kind}"

    @property
    def folder_name(self) -> str:
        """Sorts by age."""
        return f"{self.label}-{self.step:06d}"


def save(root: Path, state: State, policy: Any, optimizer: torch.optim.Optimizer | None, *, keep: int = 2) -> Path:
    """Write a checkpoint under `root` and prune old ones; a crash at any point leaves the older ones whole.

    Stage starts (step 0) are never pruned: they are the reference of KL terms.
    """
    target = root / state.folder_name
    partial = root / f".{state.folder_name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        policy.save(partial / "policy")
        trainer = {"optimizer": optimizer.state_dict() if optimizer else None, "torch_rng": torch.get_rng_state()}
        torch.save(trainer, partial / "trainer.pt")
        (partial / "state.json").write_text(json.dumps(asdict(state), indent=1))
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        raise CheckpointError(
            "the disk is full" if full else "a checkpoint could not be written",
            where=str(target),
            got=f"{type(error).__name__}: {error}",
            expected=f"{_size_gb(policy):.2f} GB free",
            hint=f"free some space, then resume; the last good checkpoint is {latest(root) or 'none yet'}",
        ) from error
    _prune(root, keep)
    return target


def _size_gb(policy: Any) -> float:
    trainable = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    return float(4 * (policy.n_parameters + 2 * trainable) / 1e9)


def _prune(root: Path, keep: int) -> None:
    found = [p for p in every(root) if not p.name.endswith("-000000")]
    for folder in found[:-keep]:
        shutil.rmtree(folder, ignore_errors=True)


def every(root: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if not p.name.startswith(".") and (p / "state.json").is_file())


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint."""
    found = every(root)
    return found[-1] if found else None


def load_state(folder: Path) -> State:
    """Read where the run stood. Raises CheckpointError for a folder that is no checkpoint."""
    try:
        return State(**json.loads((folder / "state.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            "this is not a readable checkpoint",
            where=str(folder),
            got=f"{type(error).__name__}: {error}",
            expected="a folder with policy/, trainer.pt and state.json",
            hint="resume from an older checkpoint beside it",
        ) from error


def load_trainer(folder: Path, optimizer: torch.optim.Optimizer | None) -> None:
    """Restore optimiser and generator states saved by `save`."""
    try:
        saved = torch.load(folder / "trainer.pt", weights_only=True)
        if optimizer is not None and saved["optimizer"] is not None:
            optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["torch_rng"])
    except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        raise CheckpointError(
            "the optimiser state of this checkpoint cannot be used",
            where=str(folder / "trainer.pt"),
            got=f"{type(error).__name__}: {error}",
            expected="the state of an optimiser over the same parameters",
            hint="resume from an older checkpoint beside it",
        ) from error
