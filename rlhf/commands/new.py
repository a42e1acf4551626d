"""`rlhf new`: scaffold a part or a data set of one's own, its test, and a recipe that trains with it."""

from __future__ import annotations

import ast
import keyword
import re
import sys
from enum import StrEnum
from importlib.machinery import PathFinder
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from rlhf.commands.output import AsJson, command, one_of, print_json, results
from rlhf.errors import RecipeError, disk

#: Names that a file beside a recipe must not have, beside those of Python's modules and of installed packages: it would
#: be found in place of what it is made of.
_TAKEN = frozenset({"rlhf", "rewards", "environments", "agents"}) | sys.stdlib_module_names


class Part(StrEnum):
    """Parts that can be written."""

    reward = "reward"
    environment = "environment"
    agent = "agent"
    dataset = "dataset"


@command
def new(
    part: Annotated[str, typer.Argument(metavar="PART", help=f"What to create: {', '.join(Part)}.")],
    name: Annotated[str, typer.Argument(help="Its name: lower-case letters, digits and underscores.")],
    folder: Annotated[Path, typer.Option(help="Output folder.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Scaffold a reward, environment, agent or data set with a test and a recipe.

    Example: rlhf new reward near; rlhf check recipe near.yaml; rlhf train near.yaml
    """
    kind = one_of(Part, part, f"rlhf new {part}", "part").value
    _refuse_name(kind, name)
    written = {folder / file: text for file, text in texts_of(kind, name).items()}
    for path in written:
        if path.exists():
            raise RecipeError(
                "this file exists, and nothing is overwritten",
                where=str(path),
                got="an existing file",
                expected="a new name",
                hint="give another name, or --folder",
            )
    with disk("the new files", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in written.items():
            path.write_text(text, "utf-8")
    if as_json:
        print_json({"part": kind, "name": name, "files": [str(path) for path in written]})
        return
    recipe = folder / f"{name}.yaml"
    results().print("\n".join(str(path) for path in written), soft_wrap=True, markup=False)
    results().print(f"next: rlhf check recipe {recipe}; rlhf train {recipe}", soft_wrap=True, markup=False)


def texts_of(part: str, name: str) -> dict[str, str]:
    """File name -> text of the files of a part, the part itself first."""
    words = {"name": name, "Class": _class_of(name)}
    found = {}
    for file in sorted(files("rlhf.templates").iterdir(), key=lambda f: _place(f.name)):
        if file.name.startswith(f"{part}.") and file.name.endswith(".txt"):
            target = file.name.removeprefix(f"{part}.").removesuffix(".txt").replace("NAME", name)
            found[target] = Template(file.read_text("utf-8")).substitute(words)
    return found


def _place(file: str) -> tuple[bool, bool, bool, str]:
    return "yaml" in file, "test_" in file, "jsonl" in file, file


def _refuse_name(part: str, name: str) -> None:
    if _can_name(part, name):
        return
    suggested = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_").removeprefix("test_")
    suggested = suggested if _can_name(part, suggested) else f"my_{suggested}" if suggested else "near"
    raise RecipeError(
        "this is not a valid name",
        where=f"rlhf new {part} {name}",
        got=name,
        expected="small letters, digits and underscores, a letter first, and no name that Python, an installed package "
        "or something in the file has taken",
        hint=f"rlhf new {part} {suggested}",
    )


def _can_name(part: str, name: str) -> bool:
    is_name = re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) and not keyword.iskeyword(name)
    if not is_name or name in _TAKEN or name.startswith("test_") or _is_installed(name):
        return False
    return _class_of(name) not in _taken_names(part)


def _is_installed(name: str) -> bool:
    """True if an installed package has this name; the current folder does not count."""
    path = [folder for folder in sys.path if folder and Path(folder).resolve() != Path.cwd()]
    found = PathFinder.find_spec(name, path)
    return found is not None and found.loader is not None  # a folder without code has none


def _class_of(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _taken_names(part: str) -> set[str]:
    """Names that a new class must not shadow: classes and imports in the files of a part."""
    trees = [ast.parse(text) for file, text in texts_of(part, "x").items() if file.endswith(".py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    imports = {alias.asname or alias.name for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}
    own = _class_of("x")
    return (classes | imports) - {own} if own in classes else set()
