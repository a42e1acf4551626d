"""Checkpoints: the policy as an ordinary model folder, everything else beside it, written atomically.

    checkpoints/2-policy_gradient-000040/
        policy/        model (or adapter) and tokenizer in Hugging Face format
        trainer.pt     optimiser state, generator states, and what the stage's live parts remember
        store.sqlite   what the agent's store holds, with its hash in store.sha256, where it has one
        keep           how many of its stage stay, where the recipe says so
        files.json     every other file with its size and digest, by which what was cut or changed later is found
        state.json     where the run stands; written last

A folder without `state.json` is not a checkpoint. Randomness elsewhere is a pure function of (seed, stage, step), so
nothing more is needed for a resumed run to equal an uninterrupted one.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from rlhf.digests import FILES, Mark, check_beginning, listing, seal, verify, verify_model
from rlhf.errors import CheckpointError
from rlhf.processes import current
from rlhf.tasks.sampler import Stateful
from rlhf.training.backends.optimizer import load_moments
from rlhf.training.backends.zero_optimizer_state import numbered
from rlhf.training.checkpoints.snapshot import STATE, Snapshot, damage, n_bytes
from rlhf.training.checkpoints.writer import Writer

#: Checkpoints that stay where a recipe says nothing: the last ones of the run.
KEPT = 2
#: Behind the name of a checkpoint that was found damaged and put aside.
DAMAGED = ".damaged"
#: How many checkpoints of a stage stay.
Keep = int | Literal["all"]

#: What torch raises for a file that is cut, not its own, or of another model.
_CANNOT_READ = (
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    pickle.UnpicklingError,
)


@dataclass(frozen=True)
class State:
    """Progress of a run.

    Attributes:
        stage: index of the stage in the recipe.
        stage_kind: its kind, for the reader.
        step: steps of this stage that are finished.
        finished: whether the stage is complete.
        of_steps: how many steps the recipe gave a policy-gradient stage that is; 0 for other stages, and before.
        policy_version: publications so far.
        n_updates: optimiser updates of this stage.
        n_critic_updates: those of its critic.
        kl_coef: of the next step, where the stage's loss adapts it; None is the recipe's.
        watched: step of this stage after which the policy was last evaluated on the validation tasks.
        n_since_best: these evaluations in this stage since the best one.
        references: names of the checkpoints that became the reference of their stage in its course, of the whole run,
            oldest first.
        best: name of the checkpoint whose policy was best in the evaluations during the run, by the lower end of the
            interval of its success; the earliest of several. Empty before the first of them.
        best_low: that lower end.
        n_logged: lines of metrics of the whole run.
        n_episodes: training episodes of the whole run.
        train_s: seconds spent in training stages, evaluations excluded.
        results: evaluations so far, by name.
    """

    stage: int
    stage_kind: str
    step: int
    finished: bool
    policy_version: int
    of_steps: int = 0
    n_updates: int = 0
    n_critic_updates: int = 0
    kl_coef: float | None = None
    watched: int = 0
    n_since_best: int = 0
    references: Sequence[str] = field(default_factory=list)
    best: str = ""
    best_low: float = 0.0
    n_logged: int = 0
    n_episodes: int = 0
    train_s: float = 0.0
    results: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name of the stage in metrics and trajectory files."""
        return f"{self.stage}-{self.stage_kind}"

    @property
    def folder_name(self) -> str:
        """Of its checkpoint."""
        return f"{self.label}-{self.step:06d}"

    @property
    def reference(self) -> str:
        """Name of the reference policy's checkpoint: the stage's first, unless reset."""
        own = [name for name in self.references if name.startswith(f"{self.label}-")]
        return own[-1] if own else f"{self.label}-{0:06d}"


def save(
    root: Path,
    state: State,
    policy: Any,
    optimizer: torch.optim.Optimizer | None,
    kept: Mapping[str, Stateful] = MappingProxyType({}),
    *,
    keep: Keep = KEPT,
    writer: Writer | None = None,
    beside: Callable[[Path], object] | None = None,
    logs: Mapping[str, Mark] = MappingProxyType({}),
) -> Path:
    """Write a checkpoint under `root` and prune old ones; crash-safe for the older ones.

    Of several processes all call this together, and the first one writes.

    Stage starts (step 0), later references and the best are never pruned: KL terms compare with the former.

    Args:
        root: folder of all checkpoints.
        state: where the run stands.
        policy: saved as a model folder.
        optimizer: None where the stage is over.
        kept: the live parts of the stage that remember something, by name.
        keep: how many checkpoints of this stage to leave, its start not counted, now and in later stages.
        writer: writes a copy while the caller goes on; None writes at once.
        beside: writes what else belongs to this state into the folder it is given, before the call returns.
        logs: what of the run's logs belongs to this state, by their names.
    """
    target, new, here = root / state.folder_name, root / f".{state.folder_name}.partial", current()

    def write(snapshot: Snapshot) -> None:
        with _reported(target, policy, snapshot.trainer["kept"]):
            if keep != KEPT:
                (new / "keep").write_text(str(keep))
            snapshot.write(new, _text(state), logs)
            _remove(target, new)
        _prune(root, (*state.references, state.best))

    snapshot = Snapshot.take(policy, optimizer, kept, copy=writer is not None)
    if snapshot is not None:
        with _reported(target, policy, snapshot.trainer["kept"]):
            shutil.rmtree(new, ignore_errors=True)
            snapshot.begin(new)
            if beside is not None:
                beside(new)
        if writer is None:
            write(snapshot)
        else:
            writer.start(partial(write, snapshot))
    here.gather(None, f"the checkpoint {target.name}")
    return target


def restate(root: Path, state: State, logs: Mapping[str, Mark]) -> None:
    """Replace the state of a checkpoint atomically; its policy and live parts stay.

    Of several processes all call this together, and the first one writes.
    """
    target, new = root / state.folder_name, root / f".{state.folder_name}.partial"
    if current().is_main:
        with _reported(target, None, {}):
            shutil.rmtree(new, ignore_errors=True)
            known = listing(target).marks
            for path in sorted(p for p in target.rglob("*") if p.is_file() and p.name not in (STATE, FILES)):
                linked = new / path.relative_to(target)
                linked.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(path, linked)
                except OSError:  # a file system without links
                    shutil.copy2(path, linked)
            seal(new, logs, last=STATE, text=_text(state), known=known)
            _remove(target, new)
        _prune(root, (*state.references, state.best))
    current().gather(None, f"the checkpoint {target.name}")


def _text(state: State) -> str:
    return json.dumps(asdict(state), indent=1)


@contextmanager
def _reported(target: Path, policy: Any, kept: Mapping[str, Any]) -> Iterator[None]:
    """Turn a failure to write `target` into a CheckpointError, and remove what was written of it."""
    root = target.parent
    try:
        yield
    except Exception as error:  # of Python, torch, safetensors and tokenizers, which raise one of their own each
        shutil.rmtree(root / f".{target.name}.partial", ignore_errors=True)
        size = n_bytes(policy, kept) if policy is not None else 0
        raise CheckpointError(
            "the disk is full" if _is_full(root, size, error) else "a checkpoint could not be written",
            where=str(target),
            got=f"{type(error).__name__}: {error}",
            expected=f"{size / 1e6:.1f} MB free" if size else "room for a few kilobytes",
            hint=f"free some space, then resume; the last good checkpoint is {latest(root) or 'none yet'}",
        ) from error


def _is_full(root: Path, size: int, error: Exception) -> bool:
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if is_full or "No space left" in str(error):
        return True
    # torch says only that a write failed; what was written of the checkpoint is removed again by now.
    return root.is_dir() and shutil.disk_usage(root).free < size


def _prune(root: Path, named: Sequence[str]) -> None:
    """Remove old checkpoints but for those that are `named`."""
    found = [p for p in every(root) if not p.name.endswith("-000000")]
    stay = {*found[-KEPT:], *(root / name for name in named)}
    for label in {_label(p) for p in found}:
        of_stage = [p for p in found if _label(p) == label]
        said = [(p / "keep").read_text() for p in of_stage if (p / "keep").is_file()]
        if said:
            stay.update(of_stage if said[-1] == "all" else of_stage[-int(said[-1]) :])
    for folder in found:
        if folder not in stay:
            _remove(folder)
    for left in (*root.glob(".*.partial"), *root.glob(".*.old")):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)


def _label(folder: Path) -> str:
    return folder.name.rpartition("-")[0]


def _remove(folder: Path, new: Path | None = None) -> None:
    """Remove a checkpoint; it stops being one, and `new` takes its place, before its first file goes."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    if new is not None:
        new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def every(root: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    return sorted((p for p in _folders(root) if (p / STATE).is_file()), key=_age)


def incomplete(root: Path) -> list[Path]:
    """Folders that would be checkpoints if they had a `state.json`."""
    return sorted((p for p in _folders(root) if not (p / STATE).is_file()), key=_age)


def _folders(root: Path) -> list[Path]:
    found = root.iterdir() if root.is_dir() else ()
    return [p for p in found if p.is_dir() and not p.name.startswith(".") and not p.name.endswith(DAMAGED)]


def _age(folder: Path) -> tuple[int, int, str]:
    """Stage and step; as text, stage 10 would come before stage 2."""
    stage, _, rest = folder.name.partition("-")
    step = rest.rpartition("-")[2]
    return (int(stage), int(step), "") if stage.isdecimal() and step.isdecimal() else (-1, -1, folder.name)


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint, by stage and step."""
    found = every(root)
    return found[-1] if found else None


def to_resume(root: Path, say: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint that is whole; None where none is. Newer ones that are not are put aside, and named.

    The run makes the steps of those again, and writes them anew. The folder `policy` is left to whoever loads it.

    Raises:
        CheckpointError: a file of it, or what the run logged before it, is not what was written.
    """
    for old in root.glob(".*.old"):  # a kill came before the new one was in its place
        place = root / old.name.removeprefix(".").removesuffix(".old")
        if (old / STATE).is_file() and not place.exists():
            old.rename(place)
    for folder in incomplete(root):
        say(f"left out, as it has no state.json: {folder}")
    for folder in reversed(every(root)):
        found = damage(folder, way_out(folder))
        if found is None:
            _check(folder, say)
            return folder
        aside = folder.with_name(folder.name + DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        say(f"left out, as {found}: {folder}, now {aside.name}; going on from the newest one before it that is whole")
    return None


def _check(folder: Path, say: Callable[[str], None]) -> None:
    if not verify(folder, without="policy", hint=way_out(folder)):
        say(f"caution: {folder} has no digests of its files: only their sizes are known; the next checkpoint has them")
        return
    for name, mark in listing(folder).logs.items():
        path = folder.parent.parent / name
        if path.is_file():
            check_beginning(path, mark)
        else:
            say(f"caution: {path} is gone, and with it what was logged before {folder.name}")


def load_state(folder: Path) -> State:
    """Read where the run stood. Raises CheckpointError for a folder that is no checkpoint, or was changed."""
    verify(folder, STATE, hint=way_out(folder))
    try:
        return State(**json.loads((folder / STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            "the checkpoint is not readable",
            where=str(folder),
            got=f"{type(error).__name__}: {error}",
            expected="a folder with policy/, trainer.pt and state.json",
            hint=way_out(folder),
        ) from error


def way_out(folder: Path) -> str:
    """Return the hint for a checkpoint that cannot be used."""
    names = [p.name for p in every(folder.parent) if _age(p) < _age(folder)]
    return f"remove this checkpoint to resume from {names[-1] if names else 'the beginning'}"


def way_out_of(saved: Path) -> str:
    """Hint for a model that cannot be used: `way_out` of its checkpoint; empty for another folder."""
    return way_out(saved.parent) if (saved.parent / STATE).is_file() else ""


def check_model(saved: Path, *, weights: bool = True) -> None:
    """Raise CheckpointError where a model in a checkpoint or run differs from its digests."""
    verify_model(saved, weights=weights, hint=way_out_of(saved))


def load_trainer(
    folder: Path,
    optimizer: torch.optim.Optimizer | None,
    kept: Mapping[str, Stateful] = MappingProxyType({}),
    *,
    names: Sequence[str] = (),
) -> list[str]:
    """Restore the states of optimiser, generators and live parts saved by `save`, under whatever trainer.

    Args:
        folder: of the checkpoint.
        optimizer: None reads the others alone.
        kept: the live parts.
        names: of the parameters that are trained, in order; needed where DeepSpeed saved and plain torch goes on.

    Returns:
        names of the states in the checkpoint that no part of `kept` took.
    """
    try:
        saved = torch.load(folder / "trainer.pt", weights_only=True, map_location="cpu")
        moments = saved["optimizer"]
        if optimizer is not None and moments is None:
            raise ValueError("the optimiser's state was not saved at the end of its stage")
        if optimizer is not None and moments is not None:
            if isinstance(optimizer, torch.optim.Optimizer) and "parameters" in moments:
                moments = numbered(moments, names, optimizer.state_dict()["param_groups"])
            load_moments(optimizer, moments)
            _check_shapes(optimizer)
        if missing := [name for name in kept if name not in saved["kept"]]:
            raise CheckpointError(
                "this checkpoint lacks the state of a part that needs it",
                where=str(folder / "trainer.pt"),
                got=", ".join(saved["kept"]) or "none",
                expected=", ".join(missing),
                hint=f"leave out callbacks that the run did not have, or {way_out(folder)}",
            )
        for name, part in kept.items():
            part.load_state_dict(saved["kept"][name])
        torch.set_rng_state(saved["torch_rng"])
        return [name for name in saved["kept"] if name not in kept]
    except _CANNOT_READ as error:
        raise CheckpointError(
            "the training state of this checkpoint cannot be used",
            where=str(folder / "trainer.pt"),
            got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            expected="the state of the same optimiser, over the same parameters, and of the same sampler and critic",
            hint=way_out(folder),
        ) from error


def _check_shapes(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError where a moment does not fit its parameter, before torch finds it a step later."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if torch.is_tensor(value) and value.ndim and value.shape != parameter.shape:
                got, expected = tuple(value.shape), tuple(parameter.shape)
                raise ValueError(f"{name} of shape {got} for a parameter of shape {expected}: another model's state")
