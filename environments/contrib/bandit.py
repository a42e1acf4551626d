"""Multi-armed bandits in words: several levers with random pay, a number of pulls.

After EVOLvE (arXiv 2410.06238): what counts is regret, what the pulls lost against pulling the best lever each time, in
expectation:

    regret = sum over pulls of (mean of the best lever - mean of the lever pulled)
    score  = 1 - regret / (regret of choosing a lever at random each time)

1 is the best there is, 0 is chance. Payments are drawn by the seed for each pull and lever, so the same pulls bring the
same payments.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import StepResult, after_end
from environments.core.normalise import plain_words
from environments.core.procedural import Drawn, digest
from rlhf.data import Task
from rlhf.settings import STRICT

_TEXT = "amber blue coral green indigo orange purple red silver white"
_COLOURS = tuple(_TEXT.split())
#: With fewer sets of names than this, splits are not told apart by them.
_MOST_ALIKE = 40
_GUESTS = ("a child", "a farmer", "a sailor", "a student")

#: What has been seen: for each guest and lever the payments, in the order of the pulls.
Seen = dict[tuple[int, int], list[float]]


@plain_dataclass(frozen=True)
class Levers:
    """Lever names in alphabetical order, their means for each guest, and the noise seed."""

    names: tuple[str, ...]
    means: tuple[tuple[float, ...], ...]
    noise: int

    def guest(self, pull: int) -> int:
        """Return the guest that plays at a pull."""
        return random.Random(f"guest/{self.noise}/{pull}").randrange(len(self.means))

    def regret(self, pull: int, lever: int) -> float:
        """Return the expected loss of pulling a lever."""
        means = self.means[self.guest(pull)]
        return max(means) - means[lever]

    def chance(self, pull: int) -> float:
        """Expected loss of a uniformly random pull."""
        means = self.means[self.guest(pull)]
        return max(means) - sum(means) / len(means)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Bandit(Drawn):
    """Find the lever that pays best, and pull it: Bernoulli, Gaussian or contextual; pure Python."""

    payments: Literal["bernoulli", "gaussian"] = "bernoulli"
    """A coin or none, or an amount with a deviation of `deviation`."""
    levers: Annotated[int, Field(ge=2, le=len(_COLOURS))] = 4
    """Number of levers."""
    n_contexts: Annotated[int, Field(ge=1, le=len(_GUESTS))] = 1
    """Contexts, kinds of guests, each with a best lever of its own; 1 is a plain bandit."""
    gap: Annotated[float, Field(gt=0, le=0.8)] = 0.4
    """By how much the mean of the best lever exceeds that of the next; means lie between 0.05 and 0.95."""
    deviation: Annotated[float, Field(gt=0)] = 0.25
    """Standard deviation of Gaussian payments."""
    max_steps: Annotated[int, Field(ge=1)] = 20
    """Pulls of one episode."""
    success_threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Score from which an episode counts as solved."""
    reward: Literal["regret", "payment", "score"] = "regret"
    """Of each pull: minus its regret, or what it paid; or the score, at the last one."""

    name: ClassVar[str] = "bandit"
    edition: ClassVar[str] = "-2"

    @property
    def level(self) -> str:
        """Payments, sizes and gap."""
        noise = f"{self.deviation:g}" if self.payments == "gaussian" else ""
        return f"{self.payments}{noise}-{self.levers}x{self.n_contexts}-{self.gap:g}"

    def draw(self, rng: random.Random) -> Levers:
        """Draw means in thousandths: a best one per guest, others lower by at least the gap, shuffled."""
        rows = []
        for _ in range(self.n_contexts):
            best = rng.uniform(0.05 + self.gap, 0.95)
            row = [best, best - self.gap, *(rng.uniform(0.05, best - self.gap) for _ in range(self.levers - 2))]
            rng.shuffle(row)
            rows.append(tuple(round(mean, 3) for mean in row))
        return Levers(tuple(sorted(rng.sample(_COLOURS, self.levers))), tuple(rows), rng.getrandbits(32))

    def content(self, instance: Levers) -> str:
        """The means."""
        return repr(instance.means)

    def told(self, instance: Levers) -> str:
        """Names of the levers, all that is seen of them; the means where there are too few name sets."""
        names = math.comb(len(_COLOURS), self.levers)
        return repr(instance.names) if names >= _MOST_ALIKE else self.content(instance)

    def start(self, task: Task) -> BanditEpisode:
        """Begin one attempt."""
        return BanditEpisode(self, self.instance(task))

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Best lever for each remaining pull; None where too much is lost to count as solved."""
        episode = self.start(task)
        for text in taken[: self.max_steps]:
            episode.do(text)
        levers: Levers = self.instance(task)
        path = []
        while not episode.over:
            means = levers.means[levers.guest(episode.n_pulled)]
            path.append(f"pull {levers.names[means.index(max(means))]}")
            episode.do(path[-1])
        return tuple(path) if episode.score >= self.success_threshold else None


class BanditEpisode:
    """Series of pulls. The key of a state tells the number of pulls, and of each lever how often it paid what.

    A text that is not understood costs a pull that pays nothing, with the regret of the worst lever.
    """

    def __init__(self, settings: Bandit, levers: Levers) -> None:
        self._settings, self._levers = settings, levers
        self._actions = tuple(f"pull {name}" for name in levers.names)
        self.n_pulled, self.regret = 0, 0.0
        self.seen: Seen = {}
        best_known = "; which one pays best depends on the guest" if settings.n_contexts > 1 else ""
        self.opening = StepResult(
            f"There are {settings.levers} levers: {', '.join(levers.names)}. Each pays at random, one of them more "
            f"than the others on average{best_known}. You have {settings.max_steps} pulls: earn as much as you can.\n"
            f"Answer with a lever, such as: {self._actions[0]}{self._asks()}",
            state_key=self._state_key(),
            admissible_actions=self._actions,
        )

    @property
    def over(self) -> bool:
        """True if all pulls are done."""
        return self.n_pulled == self._settings.max_steps

    @property
    def score(self) -> float:
        """1 - regret / regret of chance, over the pulls done; 1 before the first."""
        chance = sum(self._levers.chance(pull) for pull in range(self.n_pulled))
        return 1 - self.regret / chance if chance else 1.0

    async def step(self, action: str) -> StepResult:
        """Pull a lever."""
        if self.over:
            raise after_end("Bandit step", action)
        before = self.regret
        said, paid = self.do(action)
        solved = self.over and self.score >= self._settings.success_threshold
        rewards = {
            "regret": before - self.regret,
            "payment": paid or 0.0,
            "score": self.score if self.over else 0.0,
        }
        return StepResult(
            f"{said} That was the last pull." if self.over else f"{said}{self._asks()}",
            reward=rewards[self._settings.reward],
            terminated=self.over,
            state_key=self._state_key(),
            success=solved if self.over else None,
            valid=paid is not None,
            admissible_actions=() if self.over else self._actions,
        )

    async def close(self) -> None:
        """Nothing is held open."""

    def do(self, action: str) -> tuple[str, float | None]:
        """Do a pull; returns the observation and the payment, None for invalid text."""
        pull, lever = self.n_pulled, self._read(action)
        guest = self._levers.guest(pull)
        self.n_pulled += 1
        if lever is None:
            self.regret += max(self._levers.means[guest]) - min(self._levers.means[guest])
            return f"No such lever; the pull is lost. Levers: {', '.join(self._levers.names)}.", None
        self.regret += self._levers.regret(pull, lever)
        paid = self._pays(pull, guest, lever)
        self.seen.setdefault((guest, lever), []).append(paid)
        return f"The {self._levers.names[lever]} lever pays {paid:g}.", paid

    def _pays(self, pull: int, guest: int, lever: int) -> float:
        rng = random.Random(f"pay/{self._levers.noise}/{pull}/{lever}")
        mean = self._levers.means[guest][lever]
        if self._settings.payments == "bernoulli":
            return float(rng.random() < mean)
        return round(rng.gauss(mean, self._settings.deviation), 2)

    def _read(self, text: str) -> int | None:
        words = plain_words(text).removeprefix("pull ").removeprefix("the ").removesuffix(" lever")
        return self._levers.names.index(words) if words in self._levers.names else None

    def _asks(self) -> str:
        left = self._settings.max_steps - self.n_pulled
        guest = (
            f"\nThe next guest is {_GUESTS[self._levers.guest(self.n_pulled)]}."
            if self._settings.n_contexts > 1
            else ""
        )
        return f"{guest}\n{left} pull{'' if left == 1 else 's'} left."

    def _state_key(self) -> str:
        seen = sorted((where, sorted(paid)) for where, paid in self.seen.items())
        return f"{digest(repr(self._levers))}/{self.n_pulled}/{digest(repr(seen), 8)}"
