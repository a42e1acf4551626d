"""Lookup of recipes: a path, a run folder, or a name in a `recipes/` folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import rlhf
from rlhf.errors import RecipeError, closest, meant, nearest
from rlhf.evaluation.folder import nearest_beside, same_name

#: Endings of data files, which are no recipes.
_DATA = frozenset({".jsonl", ".csv", ".tsv", ".parquet"})


@dataclass(frozen=True, slots=True)
class Listed:
    """A recipe that was found by looking.

    Attributes:
        name: what `rlhf train` takes: the path inside the folder, without extension.
        doc: the first comment line.
        path: the file.
    """

    name: str
    doc: str
    path: Path


def folders(kind: str) -> tuple[Path, ...]:
    """Search folders of `recipes` or `suites`: the local one, then the installed one."""
    assert rlhf.__file__ is not None
    candidates = (Path.cwd() / kind, Path(rlhf.__file__).parent / "shipped" / kind)
    return tuple(dict.fromkeys(f.resolve() for f in candidates if f.is_dir()))


def listed_in(kind: str) -> list[Listed]:
    """All YAML files in `folders(kind)`, found recursively, sorted by name; the first folder wins."""
    found: dict[str, Listed] = {}
    for folder in folders(kind):
        for path in sorted(folder.rglob("*.yaml")):
            if path.name.startswith(".") or not path.is_file():  # such as the locks of editors
                continue
            name = path.relative_to(folder).with_suffix("").as_posix()
            found.setdefault(name, Listed(name, first_comment(path), path))
    return [found[name] for name in sorted(found)]


def list_recipes() -> list[Listed]:
    """All recipes by name."""
    return listed_in("recipes")


def find(path_or_name: str | Path) -> Path:
    """Return the recipe file that `path_or_name` means.

    Args:
        path_or_name: a file, a run folder (its resolved recipe), or a name of `list_recipes`; the last part of a name
            is enough where it is unique.

    Raises:
        RecipeError: there is none, or more than one.
    """
    path = Path(path_or_name).expanduser()
    if path.is_file() and path.suffix in _DATA:
        raise RecipeError(
            "this is data and no recipe",
            where=str(path_or_name),
            got=f"a {path.suffix} file",
            expected="a YAML file",
            hint=f"name it in a recipe: environment: {{kind: dataset, path: {path}}}",
        )
    if path.is_file():
        return path
    if (path / "recipe.yaml").is_file():
        return path / "recipe.yaml"
    listed = list_recipes()
    matches = [r for r in listed if r.name == str(path_or_name)]
    matches = matches or [r for r in listed if r.name.rpartition("/")[2] == str(path_or_name)]
    if len(matches) == 1:
        return matches[0].path
    if matches:
        raise RecipeError(
            "several recipes have this name",
            where=str(path_or_name),
            got=str(path_or_name),
            expected=" or ".join(r.name for r in matches),
            hint="give the whole name or the path",
        )
    raise _no_recipe(str(path_or_name), path, listed)


def _no_recipe(name: str, path: Path, listed: list[Listed]) -> RecipeError:
    """Error for a name, or the path it is of, that is no recipe, with what it may be meant for."""
    if path.parent.name == "checkpoints" and path.parent.is_dir():
        there = sorted(one.name for one in path.parent.iterdir() if one.is_dir())
        return RecipeError(
            "no such checkpoint",
            where=name,
            got=path.name,
            expected=", ".join(there[-8:]) or "a checkpoint of the run, which has none",
            hint=nearest(path.name, there) or "name one of them",
        )
    run = nearest_beside(path) if not path.suffix else ""
    if path.name == "checkpoints" and (path.parent / "recipe.yaml").is_file():
        run = f"its run is {path.parent}"
    names, beside = {name: name for name in _names(listed)}, files_beside(path)
    # In a folder that is named, what lies there; here, what is most like it, a file where an ending was written.
    merged = names | beside if path.suffix else beside | names
    near = [merged] if path.parent == Path() else [names, beside]
    hints = [*(_nearest_of(path.stem, known) for known in near), run]
    if (same := same_name(path)) is not None and (same / "recipe.yaml").is_file():
        hints = [meant(str(same))]
    return RecipeError(
        "no such recipe or run" if run else "no such recipe",
        where=name,
        got="a folder without recipe.yaml" if path.is_dir() else "no such file or folder, and no recipe of this name",
        expected="a YAML file, a run folder, or a name from `rlhf recipes`",
        hint=next(filter(None, hints if path.parent == Path() else hints[::-1]), "give the path of a recipe"),
    )


def files_beside(path: Path) -> dict[str, str]:
    """YAML files in the folder of `path`, as paths in its style, by stem."""
    found = sorted(file for ending in ("yml", "yaml") for file in path.parent.glob(f"*.{ending}") if file.is_file())
    return {file.stem: str(file) for file in found}


def _nearest_of(name: str, known: Mapping[str, str]) -> str:
    """Suggestion of the nearest known name; '' where none is near."""
    found = closest(name, known)
    return "" if found is None else meant(known[found])


def _names(listed: list[Listed]) -> Iterator[str]:
    for recipe in listed:
        yield recipe.name
        yield recipe.name.rpartition("/")[2]


def first_comment(path: Path) -> str:
    """Return the first comment line of a file, without its sign."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return next((line.lstrip("# ").strip() for line in file if line.startswith("#")), "")
