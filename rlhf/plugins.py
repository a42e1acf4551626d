"""Plug-in kinds of installed packages: an entry-point group per section.

    [project.entry-points."rlhf.environments"]
    maze = "my_package.mazes:Maze"

Names of `rlhf.catalog` go first. Nothing is imported before a recipe names it, so that a package which is broken is no
matter to others.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import entry_points

from rlhf.errors import RecipeError

#: Section of the catalogue -> group of entry points.
GROUPS: Mapping[str, str] = {
    "environment": "rlhf.environments",
    "agent": "rlhf.agents",
    "memory": "rlhf.memories",
    "store": "rlhf.stores",
    "reward": "rlhf.rewards",
    "advantage": "rlhf.estimators",
    "loss": "rlhf.losses",
    "correction": "rlhf.corrections",
    "critic": "rlhf.critics",
    "sampler": "rlhf.samplers",
    "selection": "rlhf.selections",
    "rollout": "rlhf.rollouts",
    "strategy": "rlhf.strategies",
}


def brought(section: str) -> Mapping[str, tuple[tuple[str, str], ...]]:
    """Plug-ins of a section by name: package and `module:Name`, several where packages collide."""
    return _brought(tuple(sys.path)).get(section, {})


def target_of(section: str, kind: str, where: str) -> tuple[str, str] | None:
    """Return the package that brings this kind, and `module:Name`; None where none does.

    Raises:
        RecipeError: several packages do.
    """
    found = brought(section).get(kind, ())
    if len(found) > 1:
        raise RecipeError(
            "several packages define this kind",
            where=where,
            got=kind,
            expected="one of " + ", ".join(f"{target} of {package}" for package, target in found),
            hint=f"name the one you mean: kind: {found[0][1]}, or uninstall the other",
        )
    return found[0] if found else None


@lru_cache(maxsize=4)
def _brought(path: tuple[str, ...]) -> Mapping[str, Mapping[str, tuple[tuple[str, str], ...]]]:
    """Look through the packages on the path, once for each path that there is in this process."""
    points, found = entry_points(), dict[str, dict[str, tuple[tuple[str, str], ...]]]()
    for section, group in GROUPS.items():
        names = found.setdefault(section, {})
        for point in points.select(group=group):
            one = (point.dist.name if point.dist else "?", point.value)
            names[point.name] = tuple(dict.fromkeys((*names.get(point.name, ()), one)))
    return found
