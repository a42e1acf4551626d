"""Games of TextArena: puzzles for one player, and board and card games for two.

    Current Board:

     X | 1 | O
    ---+---+---
     3 | O | 5
    ---+---+---
     6 | 7 | 8

    Available Moves: '[1]', '[3]', '[5]', '[6]', '[7]', '[8]'
    > [6]

Rules, words and rewards are those of the package (Guertler et al., arXiv 2504.11442). In a game for two the other
player moves at random, or both seats are played, as in self-play.

Like its boards for training, this shows the newest board alone and leaves out what players typed, which every game
offered here says in its own words.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult, after_end
from environments.contrib.textarena.games import GAMES, Chance, Family, new_game, plain, version
from environments.core.procedural import Drawn, digest
from rlhf.data import Task
from rlhf.errors import EnvError, nearest
from rlhf.settings import STRICT

#: Seats of a game for two, in the order in which the package numbers them.
SEATS = ("player 0", "player 1")
_BRACKETS = re.compile(r"\[[^\]]*\]")
_MOST_DRAWS, _TRIES, _ENOUGH, _LONGEST = 100, 32, 4, 200


@plain_dataclass(frozen=True)
class Start:
    """Random draw of a task: the seed, the seat that is played, the other's seed, and the beginning."""

    seed: int
    seat: int
    luck: int
    begins: str


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextArena(Drawn):
    """TextArena game: single-player, against a random player, or with both seats to play."""

    game: str = "TicTacToe-v0"
    """Name of the game in the package, without `-raw` or `-train` at its end."""
    opponent: Literal["random", "self"] = "random"
    """Opponent in a two-player game: `random`, which picks among all possible moves, and the task draws which seat is
    whose; or `self`, and both seats are played, each move by the seat that `StepResult.seat` names."""
    invalid_moves: Annotated[int, Field(ge=0)] = 1
    """Invalid moves in a row that are forgiven; one more loses the game. The package forgives one."""
    max_steps: Annotated[int, Field(ge=1)] = 40
    """Maximum moves per episode, including invalid ones; the other player's count only if it is played too."""
    success_threshold: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The package's reward from which an episode counts as solved; with both seats played, that of the first."""
    reward: Literal["score", "success"] = "score"
    """At the end: the package's reward of who moved last, or 1 for a solved episode. It is -1, 0 or 1 in games for two;
    in others it is at most 1, a share of the way where the game is not solved, and below 0 where that is lost."""

    name: ClassVar[str] = "textarena"

    @field_validator("game")
    @classmethod
    def _offered(cls, game: str) -> str:
        name = game.removesuffix("-raw").removesuffix("-train")
        if name not in GAMES:
            raise ValueError(f"no game '{game}' is offered; {nearest(name, GAMES) or ', '.join(GAMES)}")
        return name

    @model_validator(mode="after")
    def _fits(self) -> TextArena:
        if self.opponent == "self" and self.family.n_players == 1:
            raise ValueError(f"opponent is 'self', but {self.game} is a game for one player")
        return self

    @property
    def family(self) -> Family:
        """Description of the game."""
        return GAMES[self.game]

    @property
    def level(self) -> str:
        """Version of the package, game, and whether both seats are played."""
        return f"{version()}/{self.game}{'-self' if self.opponent == 'self' else ''}"

    @property
    def properties(self) -> Properties:
        """Properties of the environment; see `demonstrates` for those that have no oracle."""
        return replace(
            super().properties,
            oracle=self.demonstrates,
            package=f"textarena {version()}",
            isolated=False,
            seats=SEATS if self.opponent == "self" else (),
            repeats=not self.family.draws,
        )

    @property
    def demonstrates(self) -> bool:
        """True if there is an oracle: actions are listed, and moves at random can reach what counts as solved."""
        is_beyond = self.success_threshold == 1 and self.game.partition("-v0")[2] in self.family.beyond
        return self.family.actions is not None and not is_beyond

    def draw(self, rng: random.Random) -> Start:
        """Draw seeds and a seat, with which the game can begin. Raises EnvError, MissingPackageError."""
        failed: EnvError | None = None
        for _ in range(_MOST_DRAWS):
            start = Start(rng.getrandbits(31), rng.randrange(2), rng.getrandbits(31), "")
            if not self.family.draws:
                return start
            try:
                return replace(start, begins=_Play(self, start).begins)
            except EnvError as error:  # of some seeds the package makes nothing
                failed = error
        raise failed or EnvError("no seed starts this game", where=self.game)

    def content(self, instance: Start) -> str:
        """Beginning of the game, where that is all there is to draw; else the seeds."""
        return instance.begins or repr(instance)

    def start(self, task: Task) -> TextArenaEpisode:
        """Begin one attempt. Raises MissingPackageError when `textarena` is not installed."""
        return TextArenaEpisode(self, self.instance(task))

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Shortest of some random continuations that solve the task; None if none does."""
        found: list[list[str]] = []
        for i in range(_TRIES):
            play, path = _Play(self, self.instance(task)), list[str]()
            for text in taken:
                if not play.over:
                    play.do(text)
            rng = random.Random(f"{task.seed}/{len(taken)}/{i}")
            while not play.over and (listed := play.actions()):
                path.append(rng.choice(listed))
                play.do(path[-1])
            if play.solved:
                found.append(path)
            if len(found) == _ENOUGH:
                break
        best = min(found, key=len, default=None)
        return None if best is None else tuple(best)


class TextArenaEpisode:
    """Game of an episode.

    The key of a state tells the state of the game, who is to move, and what chance has in store.
    """

    def __init__(self, settings: TextArena, start: Start) -> None:
        self._settings, self._play = settings, _Play(settings, start)
        self.opening = self._result(self._play.news(), None)

    async def step(self, action: str) -> StepResult:
        """Do one move. An invalid one is answered with a warning, until there are too many in a row."""
        play = self._play
        if play.over:
            raise after_end("TextArena step", action)
        seat = play.seat
        valid = play.do(action)
        result = self._result(play.news(), seat)
        return replace(result, valid=valid)

    async def close(self) -> None:
        """Nothing is held open."""

    def _result(self, reply: str, seat: int | None) -> StepResult:
        play, settings = self._play, self._settings
        score = play.earned(seat) if seat is not None else 0.0
        reward = score if settings.reward == "score" else float(play.solved)
        return StepResult(
            reply,
            reward=reward if play.over else 0.0,
            terminated=play.done,
            truncated=play.over and not play.done,
            state_key=play.state_key,
            success=play.solved if play.over else None,
            admissible_actions=() if play.over else play.actions(),
            seat=SEATS[play.seat] if settings.opponent == "self" else "",
        )


class _Play:
    """Game of the package with its own random generator, and the opponent's random moves."""

    def __init__(self, settings: TextArena, start: Start) -> None:
        self._settings, self._chance = settings, Chance(start.seed)
        self._luck = random.Random(start.luck)
        self._game = new_game(settings.game, start.seed, self._chance)
        self._game.state.error_allowance = settings.invalid_moves
        self._own = start.seat if settings.opponent == "random" and settings.family.n_players == 2 else None
        self.n_steps, self.done = 0, False
        self.begins = digest(repr(self._known()), 8)
        self._others()

    @property
    def seat(self) -> int:
        """The seat that is to move."""
        return int(self._game.state.current_player_id)

    @property
    def over(self) -> bool:
        """True if the episode has ended."""
        return self.done or self.n_steps >= self._settings.max_steps

    @property
    def solved(self) -> bool:
        """True if the seat that is played, or the first, has earned enough."""
        return self.done and self.earned(self._own or 0) >= self._settings.success_threshold

    def earned(self, seat: int) -> float:
        """The package's reward of a seat; 0 before the end.

        A puzzle that is cut pays what it would at the package's own limit of turns, its share of the way.
        """
        if not self.done:
            share = getattr(self._game, "_get_percentage_completion", None)
            return float(share()) if self.over and share is not None else 0.0
        reward = (self._game.state.rewards or {}).get(seat, 0.0)
        # ThreeCardMonte gives the reward of an invalid move, 0, and the reason in each other's place.
        return 0.0 if isinstance(reward, str) else float(reward)

    def actions(self) -> tuple[str, ...]:
        """All possible moves, sorted; nothing where they are not listed."""
        listed = self._settings.family.actions
        return () if listed is None else tuple(sorted(listed(self._game)))

    def do(self, text: str) -> bool:
        """Do a move, and the other player's after it; returns whether it was valid."""
        self.n_steps += 1
        valid = self._move(text)
        self._others()
        return valid

    def news(self) -> str:
        """Unread observations: of boards only the newest, and at the end the reason for it."""
        state = self._game.state
        seat = self.seat if self._own is None else self._own
        told, state.observations[seat] = state.observations[seat], []
        kinds = [kind.name for _, _, kind in told]
        last = max((i for i, kind in enumerate(kinds) if kind == "GAME_BOARD"), default=-1)
        shown = [
            str(message).strip()
            for i, ((_, message, _), kind) in enumerate(zip(told, kinds, strict=True))
            if kind != "PLAYER_ACTION" and (kind != "GAME_BOARD" or i == last)
        ]
        if self.done:
            shown.append(str(state.game_info[seat].get("reason") or "The game is over.").strip())
        return "\n".join(filter(None, shown))

    @property
    def state_key(self) -> str:
        """Short, and equal where the state is."""
        return digest(repr((self._known(), self._chance.mark, hash(self._luck.getstate()[1]))), 8)

    def _known(self) -> Any:
        state = self._game.state
        game = {key: value for key, value in vars(self._game).items() if key != "state"}
        turn = state.turn if state.max_turns else 0
        return plain((game, state.game_state, state.current_player_id, state.error_count, turn))

    def _move(self, text: str) -> bool:
        """Do a move of the seat whose turn it is."""
        state, mover = self._game.state, self.seat
        said = text.strip()[:_LONGEST]
        said = said if "[" in said else f"[{said}]"
        try:
            with self._chance:
                done, _ = self._game.step(said)
        except Exception as error:
            name = self._settings.game
            raise EnvError("TextArena failed on this move", where=name, got=f"{said!r}: {error!r}") from error
        self.done = bool(done)
        # Minesweeper takes a mine that is hit for an invalid move, and leaves the cell covered.
        listed = _BRACKETS.search(said)
        is_listed = listed is not None and listed[0] in self.actions()
        return is_listed or not (state.error_count or state.game_info[mover].get("invalid_move"))

    def _others(self) -> None:
        """Play the opponent's moves until it is the played seat's turn, or the game is over."""
        while self._own is not None and not self.done and self.seat != self._own:
            self._move(self._luck.choice(self.actions() or ("[pass]",)))
