"""Repeated matrix games against scripted players: the prisoner's dilemma, the stag hunt, rock paper scissors.

    You: cooperate, the other: defect. You earn 0, the other 5.

The other follows one of a few known rules, which is not told: it has to be found out and answered. What counts is
regret: what each choice loses against the best one there was, the rest of the game played in the best way:

    regret = sum over rounds of (V(state, rounds left) - Q(state, rounds left, choice))

with V and Q computed exactly, by induction from the last round. The score is 1 - regret / (regret of the worst play).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from environments.base import StepResult, after_end
from environments.core.normalise import plain_words
from environments.core.procedural import Drawn, digest
from rlhf.data import Task
from rlhf.settings import STRICT

Game = Literal["prisoners_dilemma", "stag_hunt", "rock_paper_scissors"]
State = tuple[int, ...]

#: What one can choose; the first of two is the friendly choice.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "prisoners_dilemma": ("cooperate", "defect"),
    "stag_hunt": ("hunt stag", "hunt hare"),
    "rock_paper_scissors": ("rock", "paper", "scissors"),
}


@plain_dataclass(frozen=True)
class Script:
    """Opponent strategy: initial state, choice in a state, and next state after my choice `mine`."""

    first: State
    chooses: Callable[[State, int], int]
    after: Callable[[State, int, int], State]


#: Rules for games of two choices, 0 friendly and 1 not; `n` is the number of choices.
_TWO: Mapping[str, Script] = {
    "always_friendly": Script((), lambda s, n: 0, lambda s, n, mine: s),
    "never_friendly": Script((), lambda s, n: 1, lambda s, n, mine: s),
    "tit_for_tat": Script((0,), lambda s, n: s[0], lambda s, n, mine: (mine,)),
    "suspicious": Script((1,), lambda s, n: s[0], lambda s, n, mine: (mine,)),
    "grim": Script((0,), lambda s, n: s[0], lambda s, n, mine: (max(s[0], mine),)),
    "pavlov": Script((0,), lambda s, n: s[0], lambda s, n, mine: (s[0] if mine == 0 else 1 - s[0],)),
    "alternating": Script((0,), lambda s, n: s[0], lambda s, n, mine: (1 - s[0],)),
}

#: Rules for rock paper scissors, where choice i + 1 beats choice i; the first number is where it starts.
_THREE: Mapping[str, Script] = {
    "constant": Script((0,), lambda s, n: s[0], lambda s, n, mine: s),
    "cycle": Script((0,), lambda s, n: s[0], lambda s, n, mine: ((s[0] + 1) % n,)),
    "cycle_back": Script((0,), lambda s, n: s[0], lambda s, n, mine: ((s[0] - 1) % n,)),
    "copies": Script((0,), lambda s, n: s[0], lambda s, n, mine: (mine,)),
    "beats_last": Script((0,), lambda s, n: s[0], lambda s, n, mine: ((mine + 1) % n,)),
    "loses_to_last": Script((0,), lambda s, n: s[0], lambda s, n, mine: ((mine - 1) % n,)),
}

SCRIPTS: Mapping[str, Mapping[str, Script]] = {
    "prisoners_dilemma": _TWO, "stag_hunt": _TWO, "rock_paper_scissors": _THREE
}  # fmt: skip


@plain_dataclass(frozen=True)
class Match:
    """Repeated game: my payoffs, the opponent's strategy, and its start."""

    game: Game
    pays: tuple[tuple[int, ...], ...]
    opponent: str
    begins: int

    @property
    def script(self) -> Script:
        """The other's rule."""
        return SCRIPTS[self.game][self.opponent]

    @property
    def first(self) -> State:
        """The other's first state; in rock paper scissors the start is drawn."""
        return (self.begins,) if self.game == "rock_paper_scissors" else self.script.first


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MatrixGame(Drawn):
    """Find out by which rule the other plays, and earn the most against it; pure Python."""

    game: Game = "prisoners_dilemma"
    """Repeated game; its payoffs are drawn by the seed, in the order that defines the game."""
    opponents: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Rules by which the other may play, one of which the seed draws; all of the game where none is given."""
    max_steps: Annotated[int, Field(ge=2, le=100)] = 10
    """Rounds of one episode."""
    success_threshold: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Score from which an episode counts as solved."""
    reward: Literal["regret", "payment", "score"] = "regret"
    """Of each round: minus its regret, or what it paid; or the score, at the last one."""

    name: ClassVar[str] = "matrix_game"
    edition: ClassVar[str] = "-2"

    @model_validator(mode="after")
    def _known(self) -> MatrixGame:
        strange = [name for name in self.opponents or () if name not in SCRIPTS[self.game]]
        if strange:
            raise ValueError(f"{self.game} has no opponent '{strange[0]}'; there are: {', '.join(SCRIPTS[self.game])}")
        return self

    @property
    def level(self) -> str:
        """Game and rules."""
        return f"{self.game}{'' if self.opponents is None else '-' + '+'.join(self.opponents)}"

    def draw(self, rng: random.Random) -> Match:
        """Draw payments and a rule."""
        opponent = rng.choice(self.opponents or tuple(SCRIPTS[self.game]))
        if self.game == "rock_paper_scissors":
            win, draw = rng.randint(2, 60), rng.randint(0, 1)
            pays = tuple(tuple((draw, win, -win)[(mine - other) % 3] for other in range(3)) for mine in range(3))
            return Match(self.game, pays, opponent, rng.randrange(3))
        low, second, third, high = sorted(rng.sample(range(21), 4))
        # Defecting alone > both friendly > neither > friendly alone; in the stag hunt both friendly is best.
        if self.game == "prisoners_dilemma":
            return Match(self.game, ((third, low), (high, second)), opponent, 0)
        return Match(self.game, ((high, low), (third, second)), opponent, 0)

    def told(self, instance: Match) -> str:
        """The payments; by which rule the other plays is not seen."""
        return repr(instance.pays)

    def start(self, task: Task) -> MatrixGameEpisode:
        """Begin one attempt."""
        return MatrixGameEpisode(self, self.instance(task))

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Best choices for the remaining rounds; None where too much is lost to count as solved."""
        episode = self.start(task)
        for text in taken[: self.max_steps]:
            episode.do(text)
        path = []
        while not episode.over:
            path.append(CHOICES[self.game][episode.best()])
            episode.do(path[-1])
        return tuple(path) if episode.score >= self.success_threshold else None


class MatrixGameEpisode:
    """Match of an episode. The key of a state tells the match, the round, and the state of the other's rule.

    A text that is not understood is taken for the choice that loses most, and is not valid.
    """

    def __init__(self, settings: MatrixGame, match: Match) -> None:
        self._settings, self._match, self._state = settings, match, match.first
        self._choices = CHOICES[match.game]
        self.n_played, self.regret = 0, 0.0
        rows = [
            f"you {mine}, the other {theirs}: you earn {match.pays[i][j]}"
            for i, mine in enumerate(self._choices)
            for j, theirs in enumerate(self._choices)
        ]
        self.opening = StepResult(
            f"You play {settings.max_steps} rounds with the same player, who follows a rule. Both choose at once: "
            f"{', '.join(self._choices)}.\n" + "\n".join(rows) + "\nEarn as much as you can. Answer with your choice.",
            state_key=self._state_key(),
            admissible_actions=tuple(sorted(self._choices)),
        )

    @property
    def over(self) -> bool:
        """True if all rounds are played."""
        return self.n_played == self._settings.max_steps

    @property
    def score(self) -> float:
        """1 - regret / regret of the worst play; 1 where all play is alike."""
        n = self._settings.max_steps
        best, worst = (value(self._match, self._match.first, n, worst=worst) for worst in (False, True))
        return 1 - self.regret / (best - worst) if best > worst else 1.0

    async def step(self, action: str) -> StepResult:
        """Play a round."""
        if self.over:
            raise after_end("MatrixGame step", action)
        before, understood = self.regret, self._read(action) is not None
        said, paid = self.do(action)
        rewards = {"regret": before - self.regret, "payment": paid, "score": self.score if self.over else 0.0}
        left = self._settings.max_steps - self.n_played
        return StepResult(
            f"{said} {left} round{'' if left == 1 else 's'} left.",
            reward=float(rewards[self._settings.reward]),
            terminated=self.over,
            state_key=self._state_key(),
            success=self.score >= self._settings.success_threshold if self.over else None,
            valid=understood,
            admissible_actions=() if self.over else tuple(sorted(self._choices)),
        )

    async def close(self) -> None:
        """Nothing is held open."""

    def do(self, action: str) -> tuple[str, float]:
        """Play a round; returns what there is to say, and what was earned."""
        worth, read = self._worth(), self._read(action)
        mine = worth.index(min(worth)) if read is None else read
        self.regret += max(worth) - worth[mine]
        n = len(self._choices)
        theirs = self._match.script.chooses(self._state, n)
        self._state = self._match.script.after(self._state, n, mine)
        self.n_played += 1
        paid = self._match.pays[mine][theirs]
        unread = "" if read is not None else "Not understood, so the worst is chosen for you. "
        return f"{unread}You {self._choices[mine]}, the other {self._choices[theirs]}: you earn {paid}.", float(paid)

    def best(self) -> int:
        """The choice that loses nothing; the first of several."""
        worth = self._worth()
        return worth.index(max(worth))

    def _worth(self) -> list[float]:
        left = self._settings.max_steps - self.n_played
        return [worth(self._match, self._state, left, mine, worst=False) for mine in range(len(self._choices))]

    def _read(self, text: str) -> int | None:
        words = plain_words(text).removeprefix("i ").removeprefix("choose ").removeprefix("play ")
        words = f"hunt {words}" if f"hunt {words}" in self._choices else words
        return self._choices.index(words) if words in self._choices else None

    def _state_key(self) -> str:
        return f"{digest(repr(self._match))}/{self.n_played}/{self._state}"


def worth(match: Match, state: State, n_left: int, mine: int, *, worst: bool) -> float:
    """Q value of a choice with `n_left` rounds to play, this one included, the rest played best, or worst."""
    n = len(match.pays)
    paid = match.pays[mine][match.script.chooses(state, n)]
    return paid + value(match, match.script.after(state, n, mine), n_left - 1, worst=worst)


@lru_cache(maxsize=1 << 16)
def value(match: Match, state: State, n_left: int, *, worst: bool) -> float:
    """V: what the best play, or the worst, earns in `n_left` rounds. 0 with none left."""
    if n_left == 0:
        return 0.0
    choices = range(len(match.pays))
    return (min if worst else max)(worth(match, state, n_left, mine, worst=worst) for mine in choices)
