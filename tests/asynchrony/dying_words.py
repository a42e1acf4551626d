"""`slow_words` whose processes die to order: `kills.json` beside it has (rank, step of its environments), in turn."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.data import Task
from tests.asynchrony.slow_words import SlowEpisode, SlowWords
from tests.training.words import WordsEpisode

__all__ = ["DyingWords"]

KILLS = Path(__file__).with_name("kills.json")
N = 0


@dataclass(frozen=True)
class DyingWords(SlowWords):
    """The next of the kills is struck off before it is done."""

    def start(self, task: Task) -> WordsEpisode:
        made = super().start(task)
        assert isinstance(made, SlowEpisode)
        return DyingEpisode(made.words, made.wait_s)


class DyingEpisode(SlowEpisode):
    async def step(self, action: str) -> Any:
        global N
        N += 1
        kills = json.loads(KILLS.read_text())
        if kills and kills[0] == [int(os.environ.get("RANK", "0")), N]:
            KILLS.write_text(json.dumps(kills[1:]))
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().step(action)
