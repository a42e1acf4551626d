"""Conversion of Python arguments to plain recipe values, live parts referred to by name."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import numbers
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

from rlhf.catalog import CATALOG
from rlhf.data.untrusted import name_of
from rlhf.errors import RecipeError, RlhfError, disk, nearest
from rlhf.finite import cell
from rlhf.given_parts import PREFIX
from rlhf.recipe.aliases import alias_hint
from rlhf.recipe.builder import build_part, plain_part
from rlhf.recipe.describe import given as described
from rlhf.recipe.places import KEYS
from rlhf.recipe.text import escaped

#: Section of the part at a key of the recipe, where an object may stand for its settings.
_SECTIONS = {"policy": "policy", "environment": "environment", "agent": "agent", "rewards": "reward", "stages": "stage"}
#: Keys of a recipe that have an argument of their own.
PARTS = ("rewards", "environment", "agent")
_FILES = ("path", "train", "dev", "test")
#: Arguments of `rlhf.train` that are no keys of a recipe.
_OF_CALLS = ("callbacks", "out", "resume", "progress", "memory_check")


class Arguments:
    """Arguments of a program as plain values.

    Attributes:
        parts: objects that have no other name than theirs here, for `rlhf.given_parts.given`.
        rows: folder for files of tasks that were given as rows.
    """

    def __init__(self, rows: Path) -> None:
        self.parts: dict[str, Any] = {}
        self.rows = rows

    def key(self, name: str, value: Any, *, as_test: bool = False) -> Any:
        """Value of a recipe key; policy, environment and rewards have shorter forms in Python.

        For `as_test` see `environment`.
        """
        if name == "policy" and isinstance(value, str | PurePath):
            return {"kind": "pretrained", "path": str(value)}
        if name == "environment":
            return self.environment(value, as_test=as_test)
        return self.rewards(value) if name == "rewards" else self.plain(value, name)

    def is_live(self, part: Any, path: str) -> bool:
        """True if a part, at a recipe path, can neither be imported nor rebuilt from its keys."""
        section = _SECTIONS[path.partition(".")[0]]
        return not _is_importable(part) and _settings(section, part, path) is None

    def plain(self, value: Any, path: str) -> Any:
        """Return `value`, which stands at a dotted path of the recipe, with names in place of parts.

        Raises:
            RecipeError: an object that is no part, or stands where none goes.
        """
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, PurePath):
            return str(value)
        if isinstance(value, numbers.Integral):
            return int(value)
        if isinstance(value, numbers.Real):
            return float(value)
        if isinstance(value, Mapping):
            return {str(key): self.plain(inner, f"{path}.{key}") for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(inner, f"{path}.{i}") for i, inner in enumerate(value)]
        return self._part(value, path)

    def rewards(self, given: Any) -> dict[str, Any]:
        """Rewards by name, from a mapping, a list, or a single function, which keeps its name."""
        if not isinstance(given, Mapping):
            are_several = isinstance(given, list | tuple)
            listed = list(given) if are_several else [given]
            for i, one in enumerate(listed):
                _refuse_plain(one, f"rewards[{i}]" if are_several else "rewards")
            given = {_name_of(one): one for one in listed}
            if len(given) < len(listed):
                raise RecipeError(
                    "two rewards have one name",
                    where="rewards",
                    got=", ".join(map(_name_of, listed)),
                    expected="a name for each",
                    hint="give a mapping: rewards={'first': one, 'second': other}",
                )
        return {str(name): self._reward(one, f"rewards.{name}") for name, one in given.items()}

    def environment(self, given: Any, *, as_test: bool = False) -> Any:
        """Return the keys of an environment, of the file or rows of a data set.

        With `as_test` all rows that a program holds are test tasks; a file is split as it is in training.
        """
        if isinstance(given, Mapping):
            if as_test and _are_undivided_rows(given):
                given = {"test" if name == "path" else name: value for name, value in given.items()}
            files = {name: self._file(given[name]) for name in _FILES if name in given}
            return self.plain({**given, **files}, "environment")
        if isinstance(given, str) and given in CATALOG["environment"] and not Path(given).exists():
            return {"kind": given}
        if isinstance(given, str | PurePath) or _are_rows(given):
            return {"kind": "dataset", "test" if as_test and _are_rows(given) else "path": self._file(given)}
        return self.plain(given, "environment")

    def suite(self, given: Mapping[str, Any], *, as_test: bool) -> dict[str, Any]:
        """Return the keys of a suite, its environments, rewards and agents in any form that a recipe takes.

        `as_test` is that of `environment`, for the parts whose tasks are of the split `test`.
        """

        def keyed(values: Any) -> Any:
            if not isinstance(values, Mapping):
                return values
            named = [own["tasks"].get("split") for own in (values, given) if isinstance(own.get("tasks"), Mapping)]
            is_test = as_test and next(filter(None, named), "test") == "test"
            return {str(key): self.key(str(key), value, as_test=is_test) for key, value in values.items()}

        found = keyed({key: value for key, value in given.items() if key != "parts"})
        if isinstance(parts := given.get("parts"), Mapping):
            found["parts"] = {str(name): keyed(part) for name, part in parts.items()}
        return {**found, **({"parts": parts} if "parts" in given and "parts" not in found else {})}

    def _reward(self, one: Any, path: str) -> Any:
        if isinstance(one, Mapping | str):
            return self.plain(one, path)
        _refuse_plain(one, path)
        found = self.plain(one, path)
        return found if isinstance(found, Mapping) else {"kind": found}

    def _part(self, part: Any, path: str) -> Any:
        """Name of a function or class as a kind; settings objects are written out or named."""
        head, _, rest = path.partition(".")
        if path.endswith(".kind"):
            return self._named(part, path.removesuffix(".kind"))
        section = (
            _SECTIONS.get(head) if rest.count(".") == 0 and bool(rest) == (head in ("rewards", "stages")) else None
        )
        if section is None and "." not in path and path not in KEYS:
            hint = alias_hint(path) or nearest(path, (*KEYS, *_OF_CALLS)) or "leave it out"
            expected = f"{', '.join(_OF_CALLS)}, or a key of a recipe: {', '.join(KEYS)}"
            raise RecipeError(
                f"a recipe has no key '{path}'", where=path, got=described(part), expected=expected, hint=hint
            )
        if section is None:
            raise RecipeError(
                "an object is not allowed here",
                where=path,
                got=described(part),
                expected="a plain value, or a class or function at a key `kind`",
                hint=f"write {{'kind': {_name_of(part)}, ...}} with its keys",
            )
        if inspect.isroutine(part) or inspect.isclass(part):
            return {"kind": self._named(part, path)}
        return _settings(section, part, path) or {"kind": self._named(part, path)}

    def _named(self, part: Any, path: str) -> str:
        if _is_importable(part):
            return f"{part.__module__}:{part.__qualname__}"
        names = itertools.chain([path], (f"{path}-{n}" for n in itertools.count(2)))
        name = next(name for name in names if self.parts.get(name, part) is part)  # parts of a suite have one path
        self.parts[name] = part
        return PREFIX + name

    def _file(self, given: Any) -> Any:
        """Name of a data file; rows are written to one, named by their digest, for later runs."""
        if isinstance(given, str | PurePath):
            path = Path(given).expanduser()
            return str(path.absolute()) if path.exists() else str(given)
        if not _are_rows(given):
            return given
        text = "".join(_line(row, i) for i, row in enumerate(_rows(given)))
        if not text:
            raise RecipeError(
                "there are no tasks",
                where="environment",
                got="no rows",
                expected="a row for each task: {'prompt': ..., 'answer': ...}",
                hint="give at least one row, or the path of a file",
            )
        path = self.rows / f"rows-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
        with disk("the tasks", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        return str(path.absolute())


def _are_rows(given: Any) -> bool:
    """True for a list of rows, a `datasets` data set, or a pandas frame."""
    return (
        isinstance(given, Iterable) and not isinstance(given, str | Mapping | PurePath) and not hasattr(given, "start")
    )


def _are_undivided_rows(given: Mapping[str, Any]) -> bool:
    """True for the keys of a data set of rows, of which no key says in what split each is."""
    divides = given.keys() & {"train", "dev", "test", "split_column", "split_ratios"}
    return given.get("kind") == "dataset" and _are_rows(given.get("path")) and not divides


def _rows(given: Any) -> Any:
    if not hasattr(given, "iloc"):
        return given
    return given.astype(object).where(given.notna(), None).to_dict("records")  # pandas has a value of its own for empty


def _line(row: Any, i: int) -> str:
    """Row of a data set as a line of a file."""
    if not isinstance(row, Mapping):
        raise RecipeError(
            "rows of a data set are mappings of plain values",
            where=f"environment[{i}]",
            got=described(row),
            expected="{'prompt': ..., 'answer': ...} for each task",
            hint="give a list of dictionaries, or the path of a file",
        )
    plain = {}
    for name, value in row.items():
        try:
            plain[str(name)] = cell(value)
        except TypeError as error:
            raise RecipeError(
                "a cell of a data set holds no plain value",
                where=f"environment[{i}], column {name}",
                got=described(value),
                expected="text, a number, a date, or a list or mapping of such values",
                hint="convert the column, or leave it out",
            ) from error
    return json.dumps(plain) + "\n"


def _refuse_plain(one: Any, where: str) -> None:
    """Raise RecipeError for a plain value in the place of a reward, or of all of them."""
    if one is not None and not isinstance(one, str | numbers.Number | list | tuple):
        return
    is_one = where != "rewards"
    raise RecipeError(
        "this is not a reward" if is_one else "these are not rewards",
        where=where,
        got=described(one),
        expected="a function, a reward, or a mapping with a kind"
        if is_one
        else "a function, a list of functions, or a mapping of names to rewards",
        hint=f"rewards={{'{one}': {{'kind': '{one}'}}}}"
        if isinstance(one, str)
        else "write def right(answer, reference): return float(answer == reference), and rewards=right",
    )


def _is_importable(part: Any) -> bool:
    try:
        module, name = part.__module__, part.__qualname__
    except AttributeError:
        return False
    return module not in (None, "__main__") and getattr(sys.modules.get(module), name, None) is part


def _settings(section: str, part: Any, path: str) -> Any:
    """Return the keys of an object that these keys make again; None of any other."""
    if not _is_importable(type(part)):
        return None
    try:
        values = plain_part(section, part)
        made = build_part(section, json.loads(json.dumps(values)), path, base=Path())
    except (RlhfError, AttributeError, TypeError, ValueError):
        return None
    return escaped(values) if made == part else None


def _name_of(part: Any) -> str:
    name = name_of(part).rpartition(".")[2]
    return "reward" if name == "<lambda>" else name
