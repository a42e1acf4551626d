"""Concurrency limit of groups (additive increase, multiplicative decrease), by the engines' load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf.inference.vllm.instance import Load

#: Share of the cache above which no more groups are let in.
_FULL = 0.9
#: Groups that stay of those that run when engines have too many requests.
_CUT = 0.75
#: Reports in a row with requests that wait; one alone may be a pause for new weights.
_N_WAITING = 2


@dataclass
class AdmissionLimit:
    """Limit of groups at a time: cut where requests wait or are preempted, raised again one by one.

    Groups that run go on: only new ones are held back.

    Attributes:
        most: that it is raised to, 1 or more.
        now: the present limit.
        reason: why it is below `most`; empty where it is not.
    """

    most: int
    now: int = 0
    reason: str = ""
    _n_preempted: dict[str, int] = field(default_factory=dict)
    _n_waiting: int = 0

    def __post_init__(self) -> None:
        self.now = self.now or self.most

    def observe(self, loads: Sequence[Load], n_playing: int) -> None:
        """Update on a report of each engine that answered, and the number of running groups.

        Two reports of waiting requests in a row cut the limit to three quarters of what runs; without any it is raised
        by one for each report at which it is reached:

        >>> limit = AdmissionLimit(most=8)
        >>> for _ in range(2):
        ...     limit.observe([Load("a", running=4, waiting=3)], n_playing=8)
        >>> limit.now, limit.reason
        (6, '3 requests wait at the engines')
        >>> limit.observe([Load("a", running=4)], n_playing=6)
        >>> limit.now
        7
        """
        waiting = sum(load.waiting for load in loads)
        preempted = sum(max(load.n_preempted - self._n_preempted.get(load.name, load.n_preempted), 0) for load in loads)
        self._n_preempted |= {load.name: load.n_preempted for load in loads}
        self._n_waiting = self._n_waiting + 1 if waiting else 0
        if preempted or self._n_waiting >= _N_WAITING:
            self._n_waiting = 0
            self.now = max(1, min(self.now, math.ceil(n_playing * _CUT)))
            self.reason = f"{waiting} requests wait at the engines" if waiting else f"{preempted} were preempted there"
        elif loads and not waiting and n_playing >= self.now and max(load.cache for load in loads) < _FULL:
            self.now = min(self.most, self.now + 1)
        self.reason = self.reason if self.now < self.most else ""
