"""Tasks of a split; an environment that cannot list them is named in the error."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from environments.base import Environment
from rlhf.data import Task
from rlhf.data.untrusted import defined_at, is_listing, shown
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
        if not is_listing(listed):
            raise _no_tasks("the environment lists no tasks", f"{where}{defined_at(environment.tasks)}", shown(listed))
        if n is None and isinstance(listed, Sequence) and not isinstance(listed, list | tuple):
            found, first = listed, list(listed[:1])
        else:
            found = first = list(islice(listed, n))
    odd = [shown(task) for task in first if not isinstance(task, Task)]
    if not found or odd:
        what = "the environment lists no tasks" if not found else "an entry is not a task"
        raise _no_tasks(what, f"{where}{defined_at(environment.tasks)}", "nothing" if not found else odd[0])
    return found


def _no_tasks(what: str, where: str, got: str) -> EnvError:
    return EnvError(
        what,
        where=where,
        got=got,
        expected="at least one rlhf.data.Task, in a list or from a generator",
        hint="return [Task(id=..., ...), ...]; `rlhf check environment` looks at every split",
    )
