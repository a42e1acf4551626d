"""How to check one part of a recipe by itself, for the hint of an error about it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environments.workers.pool import Processes
from rlhf import given_parts
from rlhf.recipe.builder import plain, plain_part
from rlhf.recipe.keys import holds_objects, keys_of, section_in
from rlhf.recipe.rewards import as_named


def check_alone(section: str, part: Any) -> str:
    """Command that checks an environment or a reward alone, with its kind and the keys that are not at their default.

    A reward may need what its own tasks alone have: for it there is the check of the recipe too.

    A part that a Python program has given has no kind on the command line: it has to be put into a file.
    """
    part = as_named(part.environment if isinstance(part, Processes) else part)
    values = _chosen(section, part)
    kind = str(values.pop("kind"))
    if kind.startswith(given_parts.PREFIX):
        return f"alone, from a file of its own: `rlhf check {section} ./FILE.py:NAME`"
    if Path(kind).is_relative_to(Path.cwd()):
        kind = f"./{Path(kind).relative_to(Path.cwd())}"
    fields = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]
    at_tasks = ", or at these tasks: `rlhf check recipe FILE`" if section == "reward" else ""
    return f"alone: `{shlex.join(['rlhf', 'check', section, kind, *fields])}`{at_tasks}"


def _chosen(section: str | None, part: Any) -> dict[str, Any]:
    """Kind and plain values of a part without keys at their default; the same of a part at a key without a default."""
    values = plain_part(section, part)
    for name, key in keys_of(type(part)).items() if values.keys() - {"kind"} else ():
        if key.make_default is not None:
            if plain(key.annotation, key.make_default()) == values[name]:
                del values[name]
        elif holds_objects(key.annotation) and not isinstance(inner := getattr(part, name), Mapping | list | tuple):
            values[name] = _chosen(section_in(key.annotation), inner)
    return values
