"""Page of the Python API, from the docstrings of everything that `import rlhf` offers.

`recipe_reference.py` writes it into `python_api.md`, and a test compares the page with what this returns.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import rlhf

_INTRO = """\
# Python reference

Everything that `import rlhf` offers. [From Python](python.md) shows it at work, [Recipes](recipes.md) has the keys of a
recipe, which are keywords of `train`, `evaluate` and `load` too. `python docs/recipe_reference.py` writes this page.
"""
#: What stands on the page, in this order; what else is offered comes after it.
_FIRST = ("train", "start", "evaluate", "compare", "load", "TrainResult", "Handle", "Evaluation", "Comparisons")
_SECTION = re.compile(r"(Args|Attributes|Returns|Raises):$")
_ENTRY = re.compile(r"    (?! )([\w, ]+): (.*)")


@dataclass
class _Told:
    """A docstring: sentences, and the entries of its sections."""

    text: str
    sections: dict[str, dict[str, str]] = field(default_factory=dict)


def page() -> str:
    """Return the page as Markdown. Raises SystemExit for what has no docstring, or an argument without a line in it."""
    names = [name for name in rlhf.__all__ if not name.startswith("__")]
    ordered = [*_FIRST, *sorted(set(names) - set(_FIRST))]
    return "\n".join([_INTRO, *(line for name in ordered for line in _part(name, getattr(rlhf, name)))])


def _part(name: str, part: Any) -> Iterator[str]:
    told = _told(f"rlhf.{name}", part)
    yield from (f"## {name}", "")
    if inspect.isclass(part):
        yield from (told.text, "")
        yield from _members(name, part, told)
    else:
        yield from _called(f"rlhf.{name}", part, told)


def _members(name: str, cls: type, told: _Told) -> Iterator[str]:
    """Attributes of a class as a table, and its methods."""
    own = [(key, vars(cls)[key]) for key in vars(cls) if not key.startswith("_")]
    attributes = told.sections.get("Attributes") or told.sections.get("Args", {})
    named = {key for keys in attributes for key in keys.split(", ")}
    if lacking := sorted({f.name for f in fields(cls)} - named if is_dataclass(cls) else ()):
        raise SystemExit(f"{name}: the docstring says nothing of {', '.join(lacking)}")
    rows = [(", ".join(f"`{key}`" for key in keys.split(", ")), text) for keys, text in attributes.items()]
    rows += [(f"`{key}`", _told(f"{name}.{key}", part).text) for key, part in own if isinstance(part, property)]
    yield from _table(("attribute", "meaning"), rows)
    for key, part in own:
        if inspect.isfunction(part):
            yield from (f"### {name}.{key}", "")
            yield from _called(f"{name.lower()}.{key}", part, _told(f"{name}.{key}", part))


def _called(shown: str, function: Any, told: _Told) -> Iterator[str]:
    """Signature, sentences, arguments and errors of a function."""
    signature = inspect.signature(function)
    given = [one for key, one in signature.parameters.items() if key != "self"]
    short = [_shown(one, i > 0 and given[i - 1].kind != one.kind) for i, one in enumerate(given)]
    yield from ("```text", f"{shown}({', '.join(short)}) -> {signature.return_annotation}", "```", "", told.text, "")
    meanings = told.sections.get("Args", {})
    if meanings:
        if unknown := sorted({one.name for one in given} ^ set(meanings)):
            raise SystemExit(f"{shown}: the signature and Args of the docstring differ in {', '.join(unknown)}")
        rows = [(f"`{one.name}`", f"`{one.annotation}`", _default(one), meanings[one.name]) for one in given]
        yield from _table(("argument", "type", "default", "meaning"), rows)
    yield from _table(
        ("raises", "when"), [(f"`{kind}`", text) for kind, text in told.sections.get("Raises", {}).items()]
    )


def _shown(one: inspect.Parameter, is_first: bool) -> str:
    """Parameter as a call writes it; `*` stands before the first that is only taken by its name."""
    if one.kind is one.VAR_KEYWORD or one.kind is one.VAR_POSITIONAL:
        return f"{'**' if one.kind is one.VAR_KEYWORD else '*'}{one.name}"
    text = one.name if one.default is one.empty else f"{one.name}={one.default!r}"
    return f"*, {text}" if one.kind is one.KEYWORD_ONLY and is_first else text


def _default(one: inspect.Parameter) -> str:
    if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
        return "none"
    return "must be given" if one.default is one.empty else f"`{one.default!r}`"


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    if rows:
        yield f"| {' | '.join(heads)} |"
        yield f"|{'---|' * len(heads)}"
        yield from (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
        yield ""


def _told(name: str, part: Any) -> _Told:
    """Read the docstring of a part."""
    if not (doc := inspect.getdoc(part)):
        raise SystemExit(f"{name} has no docstring")
    told, sentences, section, last = _Told(""), list[str](), "", ""
    for line in doc.splitlines():
        if found := _SECTION.fullmatch(line):
            section, last = found[1], ""
            told.sections[section] = {}
        elif not section:
            sentences.append(line)
        elif entry := _ENTRY.fullmatch(line):
            last = entry[1]
            told.sections[section][last] = entry[2]
        elif line.strip() and last:
            told.sections[section][last] += f" {line.strip()}"
    told.text = "\n".join(sentences).strip()
    return told
