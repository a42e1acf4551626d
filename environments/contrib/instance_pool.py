"""Pool of instances that are slow to make, kept between attempts: loaded games, browsers, engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Thing = TypeVar("Thing")


class InstancePool(Generic[Key, Thing]):
    """Pool of idle instances by key, safe for threads.

    Args:
        make: makes one for a key.
        key_of: the key of one that was made.
        most: so many are kept; of more, the one that was not used for longest goes.
        close: frees one that goes.
        is_usable: whether one that comes back, or was idle, may be used again; one that may not goes.
        any_will_do: give one with another key, if there is any, before a new one is made.
    """

    def __init__(
        self,
        make: Callable[[Key], Thing],
        key_of: Callable[[Thing], Key],
        *,
        most: int,
        close: Callable[[Thing], None] = lambda _: None,
        is_usable: Callable[[Thing], bool] = lambda _: True,
        any_will_do: bool = False,
    ) -> None:
        self._make, self._key_of, self._most = make, key_of, most
        self._close, self._is_usable, self._any_will_do = close, is_usable, any_will_do
        self._lock = threading.Lock()
        self._idle: list[Thing] = []

    def take(self, key: Key) -> Thing:
        """Return an idle instance with this key, the most recently used; raises what creating one raises."""
        while (thing := self._idle_one(key)) is not None:
            if self._is_usable(thing):
                return thing
            self._close(thing)
        return self._make(key)

    def _idle_one(self, key: Key) -> Thing | None:
        with self._lock:
            for i in range(len(self._idle) - 1, -1, -1):
                if self._key_of(self._idle[i]) == key:
                    return self._idle.pop(i)
            return self._idle.pop(0) if self._any_will_do and self._idle else None

    @contextmanager
    def lent(self, key: Key) -> Iterator[Thing]:
        """Context with one, which comes back at the end, whatever happens."""
        thing = self.take(key)
        try:
            yield thing
        finally:
            self.give_back(thing)

    @contextmanager
    def kept(self, key: Key) -> Iterator[Thing]:
        """Context with one that stays taken, unless what happens inside raises."""
        thing = self.take(key)
        try:
            yield thing
        except BaseException:
            self.give_back(thing)
            raise

    def give_back(self, thing: Thing) -> None:
        """Keep one for the next attempt; the longest unused one goes when there are too many."""
        gone: Thing | None = thing
        if self._is_usable(thing):
            with self._lock:
                self._idle.append(thing)
                gone = self._idle.pop(0) if len(self._idle) > self._most else None
        if gone is not None:
            self._close(gone)

    def clear(self) -> None:
        """Close all that are not in use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for thing in idle:
            self._close(thing)

    def forget(self) -> None:
        """Leave all to the parent, in a process that was forked off.

        They stay referred to: what ends with its last reference would end for the parent, too.
        """
        self._lock, self._parents, self._idle = threading.Lock(), self._idle, []
