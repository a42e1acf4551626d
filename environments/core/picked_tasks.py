"""Lists of tasks in one order, as composite environments have them, without a copy of tasks that are read on demand."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import overload

from rlhf.data import Task

#: Name of a task of the list of this number.
Name = Callable[[Task, int], Task]


class PickedTasks(Sequence[Task]):
    """Tasks of several lists, each looked up and named when it is asked for: 16 bytes a task.

    Args:
        lists: the tasks.
        name: names a task, given the number of its list.
        numbers: the list of each task, `[N]`.
        places: its place in that list, `[N]`.
    """

    def __init__(self, lists: Sequence[Sequence[Task]], name: Name, numbers: array[int], places: array[int]) -> None:
        self._lists, self._name, self._numbers, self._places = lists, name, numbers, places

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> Task: ...
    @overload
    def __getitem__(self, at: slice) -> PickedTasks: ...
    def __getitem__(self, at: int | slice) -> Task | PickedTasks:
        if isinstance(at, slice):
            return PickedTasks(self._lists, self._name, self._numbers[at], self._places[at])
        return self._name(self._lists[self._numbers[at]][self._places[at]], self._numbers[at])


def listed(found: Iterable[Task]) -> Sequence[Task]:
    """Tasks as a sequence; one that makes them on demand is not copied."""
    return found if isinstance(found, Sequence) else list(found)


def picked(lists: Sequence[Sequence[Task]], name: Name, order: Iterable[tuple[int, int]]) -> Sequence[Task]:
    """Return the tasks of several lists in an order of number and place; a list where all are in memory.

    Raises whatever `name` raises, for all tasks, or the first of each list where one makes its tasks on demand.
    """
    numbers, places = array("Q"), array("Q")
    for number, place in order:
        numbers.append(number)
        places.append(place)
    found = PickedTasks(lists, name, numbers, places)
    if all(isinstance(tasks, list | tuple) for tasks in lists):
        return list(found)
    for number, tasks in enumerate(lists):
        if tasks:
            name(tasks[0], number)
    return found
