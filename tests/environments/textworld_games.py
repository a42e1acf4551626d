"""Games of TextWorldExpress that several tests play."""

from __future__ import annotations

from environments.contrib.textworld_express.environment import TextWorldExpress
from rlhf.data import Task

FIVE_ROOMS = TextWorldExpress(game="mapreader", params={"numLocations": 5, "maxDistanceApart": 2})


def seed_of(environment: TextWorldExpress, seed: int, split: str = "test") -> Task:
    return next(task for task in environment.tasks(split) if task.seed == seed)
