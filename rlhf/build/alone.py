"""How to check one part of a recipe by itself, for the hint of an error about it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from environments.workers.pool import Processes
from rlhf import given_parts
from rlhf.recipe.builder import plain, plain_part
from rlhf.recipe.keys import keys_of
from rlhf.recipe.rewards import as_named


def check_alone(section: str, part: Any) -> str:
    """Command that checks an environment or a reward alone, with its kind and the keys that are not at their default.

    A reward may need what its own tasks alone have: for it there is the check of the recipe too.

    A part that a Python program has given has no kind on the command line: it has to be put into a file.
    """
    part = as_named(part.environment if isinstance(part, Processes) else part)
    values = plain_part(section, part)
    kind = str(values.pop("kind"))
    if kind.startswith(given_parts.PREFIX):
        return f"alone, from a file of its own: `rlhf check {section} ./FILE.py:NAME`"
    if Path(kind).is_relative_to(Path.cwd()):
        kind = f"./{Path(kind).relative_to(Path.cwd())}"
    keys = keys_of(type(part)) if values else {}
    fields = [
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in values.items()
        if (make := keys[name].make_default) is None or plain(keys[name].annotation, make()) != value
    ]
    at_tasks = ", or at these tasks: `rlhf check recipe FILE`" if section == "reward" else ""
    return f"alone: `{shlex.join(['rlhf', 'check', section, kind, *fields])}`{at_tasks}"
