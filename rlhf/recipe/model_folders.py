"""Models that a recipe names: whether a folder is meant or a name on a hub, and whether a folder holds one."""

from __future__ import annotations

from pathlib import Path

from rlhf.errors import RecipeError


def is_local_model(named: str) -> bool:
    """Whether `named` is a folder: it is there, or it cannot be a name on a hub, which has one `/` at most."""
    return Path(named).expanduser().exists() or named.startswith((".", "/", "~")) or named.count("/") > 1


def refuse_no_model(named: str, where: str, hint: str) -> None:
    """Raise RecipeError where `named` is a folder without a model; a name on a hub is not looked up.

    Args:
        named: folder or name of the model.
        where: YAML path of the key that names it.
        hint: what to do.
    """
    folder = Path(named).expanduser()
    if is_local_model(named) and not (folder / "config.json").is_file():
        raise RecipeError(
            "there is no model in this folder",
            where=where,
            got=f"{named}, {'without config.json' if folder.is_dir() else 'no such folder'}",
            expected="a folder with config.json, tokenizer.json and *.safetensors, or a hub name",
            hint=hint,
        )
