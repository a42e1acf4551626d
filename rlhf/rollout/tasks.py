"""Tasks of a split; an environment that cannot list them is named in the error."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from environments.base import Environment
from rlhf.data import Task
from rlhf.errors import EnvError, boundary


def tasks_of(environment: Environment, split: str, n: int | None = None) -> Sequence[Task]:
    """The first `n` tasks of `split`, or all; at least one. A sequence of its own that makes them is not copied.

    Raises:
        EnvError: the environment raised, lists nothing, or lists something else.
    """
    where = f"{type(environment).__name__}.tasks({split!r})"
    found: Sequence[Task]
    with boundary(EnvError, where=where, hint="run `rlhf check environment`"):
        listed = environment.tasks(split)
        if n is None and isinstance(listed, Sequence) and not isinstance(listed, list | tuple):
            found, first = listed, list(listed[:1])
        else:
            found = first = list(islice(listed, n))
    odd = [type(task).__name__ for task in first if not isinstance(task, Task)]
    if not found or odd:
        raise EnvError(
            "this lists no tasks" if not found else "an entry is not a task",
            where=where,
            got="nothing" if not found else odd[0],
            expected="at least one rlhf.data.Task",
            hint="run `rlhf check environment`",
        )
    return found
