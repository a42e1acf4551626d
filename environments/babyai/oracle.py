"""The oracle of BabyAI: the package's bot, watched, bounded and replaced where it is at a loss.

The bot that comes with `minigrid` plans while it explores and is given the actions that were really taken. Of its own
it raises assertions where it is surprised, believes itself done where it is not, and in some states of the unlocking
levels searches for ever. It never opens boxes (`KeyInBox`) and often goes in circles in `UnlockToUnlock`. Nobody can
accomplish the missions of `OpenDoorsOrder*Debug` that name two doors: the package judges the toggle that opens the
first door also as a try at the second, and in these strict levels that fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

_TURN_RIGHT, _DROP, _DONE = 1, 4, 6  # the package's numbers

_MAX_BOTS = 5
#: Path searches for one piece of advice. Sound advice takes at most 21 of them in any level.
_MAX_SEARCHES = 100


def solve(world: Any, taken: Sequence[int | None], bot: Any) -> list[int] | None:
    """Replay `taken`, then let bots go on until the task is over.

    The first bot looks on from the start, so that it knows what was seen and done. Where it gives up, a new one takes
    over with fresh eyes, from the second time on after putting down what is carried.

    Args:
        world: the package's environment at the start of the task; it is used up.
        taken: numbers of the actions done so far; None for one that was not understood.
        bot: class of the bots, made from a world.

    Returns:
        numbers of the actions that solve the task after `taken`, or None.
    """
    guide = _Guide(world, bot)
    for number in taken:
        guide.do(number)
    guide.path.clear()
    for n_bots in range(_MAX_BOTS):
        while not guide.over and guide.advice is not None:
            guide.do(guide.advice)
        if guide.over:
            break
        if n_bots > 0:
            guide.put_down()
        guide.call_bot()
    return guide.path if guide.solved else None


@cache
def bounded(bot: Any) -> Any:
    """Return a class like `bot` that raises where `bot` would search for ever."""

    class BoundedBot(bot):  # type: ignore[misc]
        searches_left = 0

        def replan(self, action_taken: Any = None) -> Any:
            self.searches_left = _MAX_SEARCHES
            return super().replan(action_taken)

        def _breadth_first_search(self, *args: Any, **kwargs: Any) -> Any:
            self.searches_left -= 1
            if self.searches_left < 0:
                raise RuntimeError("going in circles")
            return super()._breadth_first_search(*args, **kwargs)

    return BoundedBot


class _Guide:
    """A world with a bot looking on.

    Attributes:
        over: whether the episode has ended.
        solved: whether the mission is accomplished.
        path: numbers of all actions done so far.
        advice: what the bot would do now; None where it is at a loss or thinks that it is done.
    """

    def __init__(self, world: Any, bot: Any) -> None:
        self.world = world
        self.over = self.solved = False
        self.path: list[int] = []
        self.advice: int | None = None
        self._make_bot, self._bot = bot, None
        self.call_bot()

    def call_bot(self) -> None:
        """Let a new bot look on from here."""
        self._bot = None
        with suppress(Exception):
            self._bot = self._make_bot(self.world)
        self._ask(None)

    def do(self, number: int | None) -> None:
        """Do an action, or pass a step for an invalid one; nothing once the episode is over."""
        if self.over:
            return
        if number is None:
            self.world.step_count += 1
            self.over = self.world.step_count >= self.world.max_steps
            return
        _, reward, terminated, truncated, _ = self.world.step(number)
        self.path.append(number)
        self.over, self.solved = terminated or truncated, reward > 0
        if not self.over:
            self._ask(number)

    def put_down(self) -> None:
        """Drop what is carried, on whichever side there is room."""
        for _ in range(4):
            if self.world.carrying is not None:
                self.do(_DROP)
            if self.world.carrying is not None:
                self.do(_TURN_RIGHT)

    def _ask(self, taken: int | None) -> None:
        self.advice = None
        try:
            advice = _DONE if self._bot is None else int(self._bot.replan(taken))
        except Exception:
            # The bot raises assertions, index errors and its own errors wherever it is at a loss; all mean the same.
            self._bot = None
        else:
            self.advice = None if advice == _DONE else advice
