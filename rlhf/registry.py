"""Registry of kinds: a name in a recipe becomes a class.

A recipe says `kind:` wherever a part can be chosen. A kind is

- a name of the table in `rlhf.catalog`, or one that an installed package brings (`rlhf.plugins`),
- `package.module:Name`, anything importable from where `rlhf` is started or from beside the recipe,
- `./file.py:Name`, looked for beside the recipe, then in the current folder; it can import what lies beside it
  (by its name, which within a process is one module: two files of one name beside two recipes are refused), or
- `python:name`, an object that the program which trains has given (`rlhf.given_parts`).

A recipe therefore runs Python that it names: read a stranger's recipe before you run it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from rewards.base import GroupReward
from rewards.verified import takes_completions, takes_data_source
from rlhf import given_parts, plugins
from rlhf.catalog import CATALOG, PACKAGES_OF_EXTRA
from rlhf.errors import MissingPackageError, RecipeError, UsageError, boundary, nearest
from rlhf.extras import missing
from rlhf.sections import REQUIRED_MEMBERS, SECTION_OF_TYPE


def resolve(section: str, kind: str, *, base: Path, where: str = "") -> Any:
    """Return the class (for a reward: or the function) that `kind` names.

    Args:
        section: a key of `CATALOG`.
        kind: catalogue name, `package.module:Name` or `./file.py:Name`.
        base: folder of the recipe.
        where: YAML path for messages.

    Raises:
        RecipeError: no such kind, file, module or name; a file that raises on import; a part of the wrong shape.
        MissingPackageError: an optional package is absent.
    """
    where = where or f"{section}.kind"
    if kind.startswith(given_parts.PREFIX):
        return _checked(section, given_parts.find(kind, where), kind, where)
    if ":" not in kind:
        return _from_table(section, kind, where)
    source, _, name = kind.rpartition(":")
    module = _file_module(source, base, where) if _is_file(source) else _named_module(source, base, where)
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        public = [n for n in public if getattr(vars(module)[n], "__module__", "") == module.__name__] or public
        raise RecipeError(
            f"{source} defines no '{name}'",
            where=where,
            got=kind,
            expected=", ".join(public) or "a module with a class or function",
            hint=nearest(name, public) or "name a class or function of that file after the colon",
        )
    found = _checked(section, getattr(module, name), kind, where)
    _NAMES[id(found)] = found, module.__name__, name
    return found


def kind_of(section: str, part: object) -> str:
    """Return a kind that resolves to `part` (a live object or a function) from any folder."""
    if (own := given_parts.name_of(part)) is not None:
        return given_parts.PREFIX + own
    target = part if inspect.isroutine(part) or inspect.isclass(part) else type(part)
    module, name = target.__module__, target.__qualname__
    for kind, entry in CATALOG.get(section, {}).items():
        if entry.target == f"{module}:{name}":
            return kind
    given = _NAMES.get(id(target))
    if given is not None and given[0] is target and getattr(sys.modules.get(module), name, None) is not target:
        module, name = given[1:]  # what a decorator or a factory made has the name of something else
    file = getattr(sys.modules.get(module), "__file__", None)
    if file and (module.startswith(_FILE_PREFIX) or ("." not in module and str(Path(file).parent) in _BESIDE)):
        return f"{file}:{name}"
    return f"{module}:{name}"


def section_of_type(annotation: object) -> str | None:
    """Return the section whose contract `annotation` is, or None."""
    if not isinstance(annotation, type):
        return None
    return SECTION_OF_TYPE.get(f"{annotation.__module__}:{annotation.__qualname__}")


def _from_table(section: str, kind: str, where: str) -> Any:
    table = CATALOG[section]
    if kind not in table:
        if brought := plugins.target_of(section, kind, where):
            return _from_package(section, kind, *brought, where)
        names = ", ".join([*table, *plugins.brought(section)])
        raise RecipeError(
            f"no {section} is called '{kind}'",
            where=where,
            got=kind,
            expected=f"{names}, package.module:Name, or ./file.py:Name",
            hint=f"name what it defines after a colon: {kind}:Name" if _is_file(kind) else _near(section, kind),
        )
    entry = table[kind]
    for package in PACKAGES_OF_EXTRA.get(entry.extra or "", ()):
        if importlib.util.find_spec(package) is None:
            what = f"'{kind}' needs a package that is not installed"
            raise missing(entry.extra or "", what, where, f"no module named {package}")
    module, _, name = entry.target.partition(":")
    return getattr(_imported(module, where), name)


def _from_package(section: str, kind: str, package: str, target: str, where: str) -> Any:
    """Return what an installed package brings under a name; it is the package's to mend."""
    module_name, _, name = target.partition(":")
    with _explained(f"{target} of the package {package}", where, f"fix or uninstall {package}: it declares '{kind}'"):
        module = importlib.import_module(module_name)
    if not hasattr(module, name):
        raise RecipeError(
            f"the package {package} declares '{kind}', and does not have it",
            where=where,
            got=target,
            expected=f"a class {name} in {module_name}",
            hint=f"fix or uninstall {package}",
        )
    return _checked(section, getattr(module, name), kind, where)


def _near(section: str, kind: str) -> str:
    """Say of what else `kind` is one, and what of this section is nearest to it."""
    others = [other for other, table in CATALOG.items() if kind in table]
    found = [f"'{kind}' is a kind of {' and of '.join(others)}"] if others else []
    known = [*CATALOG[section], *plugins.brought(section)]
    found += [hint] if (hint := nearest(kind, known)) else []
    return "; ".join(found) or "`rlhf recipes --kinds` lists all kinds"


def _is_file(source: str) -> bool:
    return source.endswith(".py") or "/" in source or "\\" in source


def _named_module(name: str, base: Path, where: str) -> ModuleType:
    for folder in (base.resolve(), Path.cwd()):
        _import_from(folder)
    return _imported(name, where)


def _import_from(folder: Path) -> None:
    """Put a folder at the end of the path, where nothing in it can take the place of an installed package."""
    _BESIDE.add(str(folder))
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _imported(name: str, where: str) -> ModuleType:
    with _explained(name, where, "fix the module, or name another"):
        return importlib.import_module(name)


@contextmanager
def _explained(name: str, where: str, hint: str) -> Iterator[None]:
    """Context that turns an import error of `name` into a message on a missing package or broken module."""
    token = _IMPORTED.set(name)
    try:
        with boundary(RecipeError, f"{where}, importing {name}", hint):
            try:
                yield
            except SystemExit as error:
                raise RecipeError(
                    "importing this module exits the program",
                    where=f"{where}, importing {name}",
                    got=f"SystemExit: {error}",
                    expected="a module that can be imported",
                    hint="move what it runs under `if __name__ == '__main__':`, or the part in a file of its own",
                ) from error
    except RecipeError as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError) or cause.name is None:
            raise
        if name == cause.name or name.startswith(cause.name + "."):
            raise RecipeError(
                f"no module is called '{cause.name}'",
                where=where,
                got=name,
                expected="a module that is installed, or lies beside the recipe or in the current folder",
                hint="pip install it, or write ./file.py:Name",
            ) from cause
        raise MissingPackageError(
            f"{name} needs a package that is not installed",
            where=where,
            got=f"no module named {cause.name}",
            expected="a Python with that package",
            hint=f"pip install the package that provides {cause.name}",
        ) from cause
    finally:
        _IMPORTED.reset(token)


def refuse_import(call: str) -> None:
    """Raise UsageError where `call` is made by a module that is imported for a part of a recipe."""
    if name := _IMPORTED.get():
        raise UsageError(
            f"this module calls {call} when it is imported",
            where=name,
            expected="a module that can be imported without training",
            hint=f"put {call} under `if __name__ == '__main__':`, or the part in a file of its own",
        )


_FILE_PREFIX = "recipe_file_"
_GYMNASIUM = "to bring a Gymnasium environment, write a class around it: docs/plugins.md#a-gymnasium-class"
#: By its id: a part that was resolved, and the module and name that it was found under.
_NAMES: dict[int, tuple[Any, str, str]] = {}
#: Folders that modules of parts were looked for in; another process, or a run's own recipe, does not know them.
_BESIDE: set[str] = set()
#: Module that is being imported for a part of a recipe.
_IMPORTED: ContextVar[str] = ContextVar("imported", default="")


def _file_module(source: str, base: Path, where: str) -> ModuleType:
    tried = list(dict.fromkeys((root / source).resolve() for root in (base, Path.cwd())))
    path = next((p for p in tried if p.is_file()), None)
    if path is None:
        raise RecipeError(
            "no such file",
            where=where,
            got=source,
            expected=" or ".join(map(str, tried)),
            hint="a file is looked for beside the recipe, then in the current folder",
        )
    # One file is one module however it is named, so that its classes are equal and can be pickled within the process.
    name = f"{_FILE_PREFIX}{hashlib.sha256(str(path).encode()).hexdigest()[:10]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RecipeError("not a Python file", where=where, got=str(path), expected="a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _import_from(path.parent)
    try:
        with _explained(str(path), where, "fix the file: it raises when it is imported"):
            _refuse_taken(path, where)
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _refuse_taken(path: Path, where: str) -> None:
    """Raise RecipeError if a neighbouring module of a file has the name of one that is imported already."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        for name in (name.partition(".")[0] for name in names):
            own = next((p for p in _modules_called(name, path.parent) if p.is_file()), None)
            taken = None if own is None else _imported_as(name)
            if own is None or taken is None or taken.resolve() == own.resolve():
                continue
            if any(taken in _modules_called(name, Path(folder)) for folder in _BESIDE):
                raise RecipeError(
                    f"two modules are called '{name}', and a process can load only one of them",
                    where=f"{where}, importing {path}",
                    got=str(taken),
                    expected=str(own),
                    hint="rename one of the two files, or use each recipe in a process of its own",
                )


def _modules_called(name: str, folder: Path) -> tuple[Path, Path]:
    """Files that a module or a package of this name would be in a folder."""
    return folder / f"{name}.py", folder / name / "__init__.py"


def _imported_as(name: str) -> Path | None:
    """File that `import name` gives; None for what has none."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
    else:
        spec = PathFinder.find_spec(name)
        file = spec.origin if spec is not None and spec.has_location else None
    return None if file is None else Path(file)


def _checked(section: str, target: Any, kind: str, where: str) -> Any:
    if inspect.isfunction(target) and section == "reward":
        _refuse_arguments(target, 2, kind, where)
        return target
    is_object = kind.startswith(given_parts.PREFIX) and not inspect.isclass(target)
    if not inspect.isclass(target) and not is_object:
        raise RecipeError(
            f"this is no {section}",
            where=where,
            got=f"{kind} is a {type(target).__name__}",
            expected="a class or a function" if section == "reward" else "a class",
            hint=f"name a class with {', '.join(REQUIRED_MEMBERS.get(section, ())) or 'its settings as fields'}",
        )
    cls = type(target) if is_object else target
    missing = [member for member in REQUIRED_MEMBERS.get(section, ()) if not hasattr(target, member)]
    is_gymnasium = hasattr(cls, "reset") and hasattr(cls, "step")
    if missing and not (section == "reward" and issubclass(cls, GroupReward)):
        raise RecipeError(
            f"this is no {section}: {cls.__name__} lacks {', '.join(missing)}",
            where=where,
            got=kind,
            expected=f"a class with {', '.join(REQUIRED_MEMBERS[section])}",
            hint=_GYMNASIUM if is_gymnasium else "docs/plugins.md has complete examples",
        )
    if section == "reward" and is_object:
        _refuse_arguments(target, 2, kind, where)
    elif section == "reward" and any("__call__" in vars(base) for base in target.__mro__):
        is_static = isinstance(inspect.getattr_static(target, "__call__"), staticmethod)
        _refuse_arguments(target.__call__, 2 if is_static else 3, kind, where)
    return target


def _refuse_arguments(function: Any, n: int, kind: str, where: str) -> None:
    """Raise RecipeError where a reward cannot be called with two arguments, which `self` makes `n`."""
    if takes_completions(function) or takes_data_source(function):  # which are called by names
        return
    try:
        takes = inspect.signature(function)
    except (TypeError, ValueError):  # a function of another language
        return
    try:
        takes.bind(*[None] * n)
    except TypeError as error:
        own = list(takes.parameters.values())[n - 2 :]
        raise RecipeError(
            "a reward takes (task, trajectory), a verifier (answer, reference)",
            where=where,
            got=f"{kind}, which takes ({', '.join(map(str, own))})",
            expected="(answer, reference), (task, trajectory), (completions, ...) as TRL's functions, or "
            "(data_source, solution_str, ground_truth, ...) as verl's",
            hint="write (answer, reference) for its parameters, or (task, trajectory); others need a default",
        ) from error
