"""Arguments of `rlhf evaluate` as plain values, and the kind of policy that a name stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf.evaluation.folder import kept_in
from rlhf.recipe.files import list_recipes

#: Policies that are no model and come along.
BASELINES = ("random", "oracle")


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """Arguments of the command line, in plain values; an evaluation's folder keeps them.

    Attributes:
        target: a recipe, run or checkpoint; a model, adapter or hub name; `random`, `oracle`, or an agent's kind.
        overrides: `key=value` of the recipe, or of the model.
        checkpoint: weights, where they are not the recipe's own.
        suite: name or file of the suite, or its keys; empty for the recipe's own evaluation.
        split, n, attempts: other values than the suite's.
        strategy: another than the suite's: a kind, or a mapping with a kind and keys, as text.
        endpoint, model: address of an OpenAI-compatible server, and the model's name there.
        tries: how often that server is asked for one reply; None is the default.
        also_trained: whether tasks that the policy was trained on may judge it.
        command: of an outside agent's program, which asks the policy through the gateway; empty for agents of ours.
        programs: that run at a time, each for one attempt after the other; None starts one for each attempt.
    """

    target: str
    overrides: tuple[str, ...] = ()
    checkpoint: str | None = None
    suite: str | Mapping[str, Any] = ""
    split: str | None = None
    n: int | None = None
    attempts: int | None = None
    strategy: str = ""
    also_trained: bool = False
    endpoint: str = ""
    model: str = ""
    tries: int | None = None
    command: str = ""
    programs: int | None = None

    @property
    def plain(self) -> dict[str, Any]:
        """For a file."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "", (), False)}


def is_program(target: str) -> bool:
    """True if `target` is a model-free policy: `random`, `oracle`, or the kind of an agent."""
    return target in BASELINES or (":" in target and not Path(target).exists())


def is_model(target: str) -> bool:
    """True if `target` names a model and no recipe: a model folder, `owner/name` without such a file, or `base`."""
    folder = Path(target).expanduser()
    if (folder.parent / "state.json").is_file() or (folder / "state.json").is_file():
        return False
    if folder.exists():
        return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    if target == "base":
        return True
    # Beside runs a name that is none of them is a run misspelt, as no owner on a hub has the name of that folder.
    return target.count("/") == 1 and not kept_in(folder.parent) and target not in {r.name for r in list_recipes()}
