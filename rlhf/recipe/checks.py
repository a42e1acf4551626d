"""Walks the parts of a recipe and collects what they, and the rules between them, find wrong.

What a part asks of those around it stands in its own class, in a method `check`; what two contracts ask of each other
in `rlhf.recipe.compatibility`. What is legal but probably not meant is a caution: `rlhf show` and `rlhf train` print
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlhf.checking import Problem
from rlhf.errors import RecipeError, boundary
from rlhf.recipe.compatibility import CAUTIONS, OF_ALL, OF_STAGES, OF_TASKS
from rlhf.recipe.view import Place, places, view_of

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def validate_recipe(recipe: Recipe, *, is_trained: bool = False) -> None:
    """Raise RecipeError for the first problem of a recipe whose parts are valid by themselves.

    A policy that is trained already may be asked by another agent, which calls it in fewer roles: then nothing trains
    on the others, and an adapter that reads nothing changes nothing.
    """
    for problem in problems(recipe, is_trained=is_trained):
        raise problem.error


def problems(recipe: Recipe, *, is_trained: bool = False) -> Iterator[Problem]:
    """Yield every problem of a recipe, tasks before stages; later ones may follow from the first."""
    view = view_of(recipe)
    found = places(recipe, view, is_trained=is_trained)
    # Agent and rewards come first among the places.
    acts = [place for place in found if place.context.path.partition(".")[0] in ("agent", "rewards")]
    yield from _answers("check", acts)
    for rule in (*OF_TASKS, *OF_STAGES):
        yield from rule(view, found)
    yield from _answers("check", found[len(acts) :])
    for rule in OF_ALL:
        yield from rule(view, found)
    if recipe.cluster.is_on and recipe.cluster.learners > 1:
        yield from _answers("check_processes", found, recipe.cluster.learners)


def cautions(recipe: Recipe) -> list[str]:
    """Say what is legal and probably not meant, one sentence each."""
    view = view_of(recipe)
    said = [text for caution in CAUTIONS for text in caution(view)]
    return said + list(_answers("cautions", places(recipe, view)))


def _answers(method: str, found: Sequence[Place], *arguments: object) -> Iterator[Any]:
    """Give what the parts yield in a method of this name, which only their class can have."""
    for place in found:
        ask = getattr(type(place.part), method, None)
        if ask is not None:
            with boundary(RecipeError, f"{place.context.path}, {method}", f"fix {type(place.part).__name__}.{method}"):
                yield from ask(place.part, place.context, *arguments)
