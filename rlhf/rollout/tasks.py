"""The tasks of a split, with the environment to blame where it cannot list them."""

from __future__ import annotations

from itertools import islice

from environments.base import Environment
from rlhf.data import Task
from rlhf.errors import EnvError, boundary


def tasks_of(environment: Environment, split: str, n: int | None = None) -> list[Task]:
    """The first `n` tasks of `split`, or all; at least one.

    Raises:
        EnvError: the environment raised, lists nothing, or lists something else.
    """
    where = f"{type(environment).__name__}.tasks({split!r})"
    with boundary(EnvError, where=where, hint="run `rlhf check environment`"):
        found = list(islice(environment.tasks(split), n))
    odd = [type(task).__name__ for task in found if not isinstance(task, Task)]
    if not found or odd:
        raise EnvError(
            "this lists no tasks" if not found else "an entry is not a task",
            where=where,
            got="nothing" if not found else odd[0],
            expected="at least one rlhf.data.Task",
            hint="run `rlhf check environment`",
        )
    return found
