"""Episode listeners: functions called with each finished episode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from rlhf.data import Trajectory


@dataclass(frozen=True, slots=True)
class EndedEpisode:
    """An episode that has ended, with its place in time.

    Attributes:
        trajectory: what was done; `duration_s` of it is that of the episode.
        session: name of it, unique among live episodes.
        begun: seconds since 1970.
        prepared_s: seconds after which its first turn began.
    """

    trajectory: Trajectory
    session: str
    begun: float
    prepared_s: float


Listener = Callable[[EndedEpisode], object]
_listeners: list[Listener] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Call `listener` with every episode of this process; returns a function that removes it."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener) if listener in _listeners else None


def tell(episode: EndedEpisode) -> None:
    """Call all listeners. One that raises is removed; the episode is unaffected."""
    for listener in list(_listeners):
        try:
            listener(episode)
        except Exception as error:
            _listeners.remove(listener)
            warnings.warn(f"an episode listener raised and was removed: {type(error).__name__}: {error}", stacklevel=2)
