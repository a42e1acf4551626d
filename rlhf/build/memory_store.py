"""The store of a run, and that of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agents.stores import copies
from agents.stores.remembering import Remembering
from agents.stores.store import Store
from rlhf.errors import StoreError
from rlhf.recipe import Recipe
from rlhf.recipe.suites import Part, Suite
from rlhf.registry import kind_of
from rlhf.rollout.tasks import tasks_of
from rlhf.training.contrib.memory_store import KIND, StoreKeeper, opened
from rlhf.training.stages.policy_gradient import PolicyGradient


def make_store_keeper(recipe: Recipe, folder: Path, found: Path | None) -> StoreKeeper | None:
    """Store keeper of a run, from checkpoint `found` or new; None where the agent has no store."""
    agent: Any = recipe.agent
    if not isinstance(agent, Remembering):
        return None
    splits = [stage.split for stage in recipe.stages if isinstance(stage, PolicyGradient)]
    own = recipe.evaluation
    tasks = [] if own.allow_overlap else tasks_of(recipe.environment, own.split, own.n_tasks)
    judged, kind = {task.id for task in tasks}, kind_of("store", agent.store)
    return StoreKeeper.of(agent, folder, found, (splits or ["train"])[0], judged, kind)


def agent_of(part: Part, checkpoint: Path | None, model: str = "") -> Any:
    """Agent of an evaluation; one with a memory reads the checkpoint's store and never writes it.

    Args:
        part: of the suite.
        checkpoint: None for a model that is no checkpoint.
        model: its name; one that was exported has its store in its folder. Another has none.

    Raises:
        StoreError: there is no store, it is damaged, or one of the tasks has left something in it.
    """
    folder = _store_folder(part, checkpoint, model)
    if folder is None or not isinstance(part.agent, Remembering):
        return part.agent
    return opened(part.agent, folder, {task.id for task in part.tasks.of(part.environment)})


def refuse_other_kind(suite: Suite, checkpoint: Path | None, model: str = "") -> None:
    """Raise StoreError where an agent would read another kind's store; arguments as of `agent_of`."""
    for part in suite.parts:
        agent: Any = part.agent
        folder = _store_folder(part, checkpoint, model)
        if folder is None or not (folder / copies.FILE).is_file():
            continue  # that there is none is found where it is opened
        kind = kind_of("store", agent.store)
        copies.check(folder)
        with Store(folder / copies.FILE) as store:
            before = store.kept(KIND)
        if before and before != kind.rpartition("/")[2]:  # a file of one's own may move
            raise StoreError(
                "the store of this policy is of another kind",
                where="agent.store.kind",
                got=f"{kind}, for the store in {folder}",
                expected=before,
                hint=f"leave the key out, or evaluate a policy that was trained with a store of the kind {kind}",
            )


def _store_folder(part: Part, checkpoint: Path | None, model: str) -> Path | None:
    """The folder with the store that the agent of `part` reads; None where it reads none."""
    if not isinstance(part.agent, Remembering):
        return None
    if checkpoint is None and model and (Path(model).expanduser() / copies.FILE).is_file():
        return Path(model).expanduser()
    return checkpoint
