"""Recipe: load, override, validate, dump.

A recipe is a YAML file of 15 to 30 lines that names the parts of a run and lists what differs from their defaults:

    policy: {kind: pretrained, path: Qwen/Qwen3-0.6B, lora: {rank: 16}}
    environment: {kind: textworld_express, game: mapreader}
    agent: {kind: chat}
    rewards:
      solved: {kind: outcome}
      invalid: {kind: invalid_action, weight: 0.5}
    stages:
      - {kind: policy_gradient, steps: 60, group_size: 8, advantage: {kind: gigpo}}

It is closed and strict: unknown keys, wrong types and ranges, and parts that do not fit each other are errors before
anything loads. A nested mapping (`optimizer: {lr: 1e-4}`) changes what it names and keeps the other defaults.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf import given_parts
from rlhf.digests import Manifest
from rlhf.errors import RenamedWarning
from rlhf.evaluation.folder import RECIPE, VERSIONS
from rlhf.recipe.checks import validate_recipe
from rlhf.recipe.files import Listed, find, list_recipes
from rlhf.recipe.model import Recipe, recipe_of, values_of
from rlhf.recipe.text import overridden, read, to_text

__all__ = ["Listed", "Recipe", "dump", "find", "list_recipes", "load", "load_values"]


def load(path_or_name: str | Path, overrides: Sequence[str] = (), *, is_trained: bool = False) -> Recipe:
    """Load a recipe.

    Args:
        path_or_name: a YAML file, a run folder, or a name from `list_recipes`.
        overrides: `key=value` with dotted keys, such as `stages.1.steps=5`; a value replaces what was there.
        is_trained: whether the policy is there already, and is only to be evaluated: its agent may be another one.

    Raises:
        RecipeError: anything that cannot be run as written.
        CheckpointError: it is that of a run, and not what was written.
        MissingPackageError: a part needs a package that is not installed.
    """
    path = find(path_or_name)
    if path.name == RECIPE:
        hint = "undo the change: what a run was made with stays; other values are given on the command line"
        Manifest(path.parent).require(path, hint)
    # A run is named by its recipe; the file of a run folder is always called recipe.yaml and carries its name inside.
    with warnings.catch_warnings():
        if path.name == RECIPE and (path.parent / VERSIONS).is_file():  # that of a run, which nobody may change
            given = "|".join(re.findall(r"\w+", " ".join(overrides))) or "(?!)"
            of_file = rf"(?!.*\b({given}) (is now called|has no effect))"
            warnings.filterwarnings("ignore", of_file, RenamedWarning)
        recipe = recipe_of(read(path, overrides), name=path.stem, base=path.resolve().parent)
    validate_recipe(recipe, is_trained=is_trained)
    return recipe


def load_values(values: Mapping[str, Any], overrides: Sequence[str] = (), *, name: str, base: Path = Path()) -> Recipe:
    """Load a recipe from plain values, as `load` does from a file.

    Args:
        values: what the YAML would hold.
        overrides: `key=value` with dotted keys.
        name: of the run, where the values say none.
        base: folder that files named by a kind are looked for in.
    """
    recipe = recipe_of(overridden(values, overrides, "the recipe"), name=name, base=base.resolve())
    validate_recipe(recipe)
    return recipe


def dump(recipe: Recipe) -> str:
    """Write `recipe` as YAML with every default in it. Loading that text gives an equal recipe, from any folder.

    What a Python program has given is named in a line above it, and has to be given again.
    """
    return given_parts.note(to_text(values_of(recipe)))
