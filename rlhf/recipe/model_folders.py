"""Models that a recipe names: whether a folder is meant or a name on a hub, and whether a folder holds one."""

from __future__ import annotations

from rlhf.checking import is_local_model, no_model

__all__ = ["is_local_model", "refuse_no_model"]


def refuse_no_model(named: str, where: str, hint: str) -> None:
    """Raise RecipeError where `named` is a folder without a model; a name on a hub is not looked up.

    Args:
        named: folder or name of the model.
        where: YAML path of the key that names it.
        hint: what to do.
    """
    for problem in no_model(named, where, hint):
        raise problem.error
