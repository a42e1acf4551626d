"""The recipes of the repository load as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf.errors import MissingPackageError
from rlhf.recipe import list_recipes, load

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
SHIPPED = sorted(RECIPES.rglob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=[str(p.relative_to(RECIPES).with_suffix("")) for p in SHIPPED])
def test_it_loads_and_says_what_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parent)
    try:
        recipe = load(path)
    except MissingPackageError as error:
        pytest.skip(str(error))
    assert recipe.name and recipe.stages
    [doc] = [listed.doc for listed in list_recipes() if listed.path.resolve() == path]
    assert doc


@pytest.mark.parametrize("path", SHIPPED, ids=[str(p.relative_to(RECIPES).with_suffix("")) for p in SHIPPED])
def test_it_is_as_short_as_the_readme_promises(path: Path) -> None:
    [promised] = re.findall(r"recipe of at\s+most\s+(\d+)\s+lines", (RECIPES.parent / "README.md").read_text("utf-8"))
    assert len(path.read_text("utf-8").splitlines()) <= int(promised)


def test_the_quickstart_with_adapters_is_the_quickstart_but_for_them() -> None:
    whole, adapters = (load(RECIPES / f"quickstart{ending}.yaml") for ending in ("", "-lora"))
    assert adapters.policy.lora is not None and whole.policy.lora is None
    for name in ("environment", "agent", "limits", "evaluation"):
        assert getattr(adapters, name) == getattr(whole, name)
    assert [type(stage) for stage in adapters.stages] == [type(stage) for stage in whole.stages]
    assert adapters.stages[1].advantage == whole.stages[1].advantage
