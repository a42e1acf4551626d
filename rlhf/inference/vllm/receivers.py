"""The instances that a delivery goes to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rlhf.errors import EngineError
from rlhf.inference.vllm.instance import Instance, InstanceDownError

T = TypeVar("T")


class Receivers:
    """The instances of one delivery. Who vanishes meanwhile is left out, as long as another stays.

    Args:
        instances: at least one.
        lose: told of every one that is left out, and why.
    """

    def __init__(self, instances: Sequence[Instance], lose: Callable[[Instance, EngineError], None]) -> None:
        self.instances = list(instances)
        self._lose = lose

    async def each(self, do: Callable[[Instance], Awaitable[T]]) -> list[T]:
        """Results of `do` on all instances at once, of those that are left, in the order of `instances`.

        Raises:
            EngineError: the first error, once all have ended, of an instance that still answers, or of the last one.
        """
        results = await asyncio.gather(*(do(instance) for instance in self.instances), return_exceptions=True)
        found, gone = [], []
        for instance, result in zip(self.instances, results, strict=True):
            if not isinstance(result, BaseException):
                found.append(result)
            elif isinstance(result, InstanceDownError) and not await instance.is_up():
                gone.append((instance, result))
            else:
                raise result
        if gone and not found:
            raise gone[0][1]
        for instance, error in gone:
            self.instances.remove(instance)
            self._lose(instance, error)
        return found
