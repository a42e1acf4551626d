"""Games of TextArena: rules, seats, chance of their own, and the same transcripts in every process."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("textarena")

from environments.contrib.textarena.environment import SEATS, TextArena
from environments.contrib.textarena.games import GAMES, Chance
from rlhf.data import Task
from tests.environments.play import play, play_at_random
from tests.environments.worlds import random_play

ROOT = Path(__file__).resolve().parents[2]
TASK = Task(id="t", seed=20_000_000)


def transcripts() -> str:
    """A digest of one episode of each game: what was read, the keys of states, and what was possible."""
    found = hashlib.sha256()
    for game, family in sorted(GAMES.items()):
        for opponent in ("random", "self")[: family.n_players]:
            settings = TextArena(game=game, opponent=opponent, max_steps=12)  # type: ignore[arg-type]
            task = Task(id=game, seed=20_000_001)
            if family.actions is None:
                results = play(settings, task, ["[1 2 3 4]", "[4 3 2 1]", "[5 6 1 2 3 4]"])
            else:
                results = play_at_random(settings, task, 3, n=12)
            for r in results:
                found.update(repr((r.reply, r.state_key, r.admissible_actions, r.reward, r.seat)).encode())
    return found.hexdigest()


def test_every_game_plays_alike_in_a_process_of_another_hash_seed() -> None:
    code = "from tests.environments.test_textarena import transcripts; print(transcripts())"
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == transcripts()


def test_what_is_listed_is_possible_in_every_game() -> None:
    for game, family in GAMES.items():
        if family.actions is not None:
            results = play_at_random(TextArena(game=game, max_steps=8), TASK, 1, n=8)
            assert all(r.valid for r in results), game


def test_chance_is_the_episodes_own_and_the_shared_generator_is_left_alone() -> None:
    settings = TextArena(game="PigDice-v0-short", opponent="self")
    random.seed(5)
    before = random.getstate()
    alone = play(settings, TASK, ["roll"] * 6)
    assert random.getstate() == before
    one, other = settings.start(TASK), settings.start(Task(id="u", seed=20_000_003))

    async def interleaved() -> list[str]:
        said = []
        for _ in range(len(alone) - 1):
            said.append((await one.step("roll")).reply)
            random.random()
            await other.step("roll")
        return said

    assert asyncio.run(interleaved()) == [r.reply for r in alone[1:]]


def test_a_mark_of_chance_changes_when_it_is_drawn_from_and_only_then() -> None:
    chance = Chance(3)
    first = chance.mark
    with chance:
        pass
    assert chance.mark == first == Chance(3).mark
    with chance:
        random.random()
    assert chance.mark != first


def test_two_seats_take_turns_and_each_move_has_the_reward_of_who_made_it() -> None:
    # Player 0 takes the top row: 0, 1, 2. Player 1 answers 3 and 4.
    results = play(TextArena(game="TicTacToe-v0", opponent="self"), TASK, ["0", "3", "[1]", "4", "I take [2]"])
    assert [r.seat for r in results[:-1]] == [SEATS[0], SEATS[1], SEATS[0], SEATS[1], SEATS[0]]
    assert [r.reward for r in results] == [0, 0, 0, 0, 0, 1]
    assert results[-1].terminated and results[-1].success and results[-1].reply.endswith("Player 0 has won!")
    assert "You are Player 0" in results[0].reply and "You are Player 1" in results[1].reply
    assert "You are Player" not in results[2].reply  # the rules are read once by each
    # The same by player 1: the reward is the mover's, the episode counts for the first seat.
    lost = play(TextArena(game="TicTacToe-v0", opponent="self"), TASK, ["8", "0", "3", "1", "4", "2"])
    assert lost[-1].reward == 1 and lost[-1].success is False


def test_an_invalid_move_is_forgiven_once_in_a_row_and_then_loses() -> None:
    results = play(TextArena(game="TicTacToe-v0", opponent="self"), TASK, ["0", "0", "1", "9", "0"])
    assert [r.valid for r in results[1:]] == [True, False, True, False, False]
    assert results[2].seat == SEATS[1]  # who erred tries again
    assert results[-1].terminated and results[-1].reward == -1 and results[-1].success is False
    strict = play(TextArena(game="TicTacToe-v0", opponent="self", invalid_moves=0), TASK, ["hello"])
    assert strict[-1].terminated and strict[-1].reward == -1


def test_against_chance_the_task_draws_the_seat() -> None:
    settings = TextArena(game="Nim-v0")
    openings = [settings.start(task).opening for task in list(settings.tasks("train"))[:40]]
    first = sum("Welcome to Nim, Player 0" in o.reply for o in openings)
    assert 8 < first < 32 and {o.seat for o in openings} == {""}
    assert all("removes" in o.reply for o in openings if "Player 1!" in o.reply)  # the other has moved


def test_a_game_that_the_seed_draws_is_in_one_split_alone() -> None:
    settings = TextArena(game="GuessTheNumber-v0")
    numbers: dict[str, set[str]] = {}
    for split in ("train", "dev", "test"):
        for task in settings.tasks(split):
            plan = settings.plan(task, ())
            assert plan is not None
            numbers.setdefault(split, set()).add(plan[-1])
    assert sum(map(len, numbers.values())) == len(set().union(*numbers.values())) == 20
    assert {split: len(list(settings.tasks(split))) for split in numbers} == {s: len(n) for s, n in numbers.items()}


def test_moves_are_cut_at_the_limit_and_guessing_is_answered() -> None:
    settings = TextArena(game="GuessTheNumber-v0", max_steps=2)
    task = next(iter(settings.tasks("test")))
    secret = settings.start(task)._play._game.game_number
    low, high = (f"{n}" for n in (secret - 1 or 2, secret + 1 if secret < 20 else 19))
    results = play(settings, task, [low, high])
    assert results[-1].truncated and not results[-1].terminated and results[-1].success is False
    assert results[-1].reward == 1 - 1 / 19  # one off, of 19 at most
    done = play(settings, task, [str(secret)])
    assert done[-1].success and done[-1].reward == 1 and "correct" in done[-1].reply


def test_a_cut_puzzle_pays_its_share_of_the_way_as_one_given_up_does() -> None:
    settings = TextArena(game="2048-v0-super-easy", max_steps=12)
    moves: list[str] = []
    while len(moves) < 12:
        moves.append(play(settings, TASK, moves)[-1].admissible_actions[0])
    cut, given_up = play(settings, TASK, moves), play(settings, TASK, [*moves[:10], "hm", "hm"])
    assert cut[-1].truncated and given_up[-1].terminated
    assert 0 < given_up[-1].reward <= cut[-1].reward < 1 and not cut[-1].success
    assert play(TextArena(game="2048-v0-super-easy", max_steps=1, reward="success"), TASK, moves[:1])[-1].reward == 0


def test_a_mine_is_a_move_that_was_understood() -> None:
    settings = TextArena(game="Minesweeper-v0-small")
    episode = settings.start(TASK)
    first = asyncio.run(episode.step("[0 0]"))
    grid = episode._play._game.grid
    r, c = next((r, c) for r, row in enumerate(grid) for c, cell in enumerate(row) if cell == -1)
    results = play(settings, TASK, ["[0 0]", f"I reveal [{r} {c}]", f"[{r} {c}]"])
    assert [x.valid for x in results[1:]] == [first.valid, True, True] and "mine" in results[-1].reply
    assert results[-1].terminated and not results[-1].success
    assert not play(settings, TASK, ["[0 0]", "[0 0]"])[-1].valid


def test_an_invalid_guess_of_a_cup_loses_with_nothing() -> None:
    for said in ("hello", "[9]"):
        results = play(TextArena(game="ThreeCardMonte-v0"), TASK, [said, said])
        assert [r.valid for r in results[1:]] == [False, False]
        assert (results[-1].terminated, results[-1].reward, results[-1].success) == (True, 0.0, False)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"game": "TicTacTo-v0"}, "did you mean 'TicTacToe-v0'?"),
        ({"game": "Chess-v0"}, "no game 'Chess-v0' is offered"),
        ({"game": "Minesweeper-v0", "opponent": "self"}, "a game for one player"),
    ],
)
def test_what_is_not_offered_is_refused(keys: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=r"offered|one player") as caught:
        TextArena(**keys)  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_a_name_may_carry_the_ending_of_a_wrapped_game() -> None:
    assert TextArena(game="Nim-v0-train") == TextArena(game="Nim-v0-raw") == TextArena(game="Nim-v0")


def test_a_game_without_a_list_of_moves_cannot_demonstrate() -> None:
    settings = TextArena(game="Mastermind-v0")
    assert not settings.properties.oracle and not settings.demonstrates
    assert settings.start(TASK).opening.admissible_actions == ()


def test_a_game_that_moves_at_random_never_solve_cannot_demonstrate() -> None:
    for game in ("2048-v0", "Blackjack-v0", "LightsOut-v0", "Minesweeper-v0-hard", "PigDice-v0-long"):
        settings = TextArena(game=game)
        assert not settings.properties.oracle and not settings.demonstrates
        assert not settings.family.draws or settings.plan(TASK, ()) is None
    easy = TextArena(game="Blackjack-v0", success_threshold=0.4)
    assert easy.properties.oracle and easy.plan(TASK, ())
    assert TextArena(game="2048-v0-mega-easy").demonstrates and TextArena(game="Minesweeper-v0-small").demonstrates
    assert all(set(family.beyond) <= set(family.levels) for family in GAMES.values())


@pytest.mark.extended
@pytest.mark.parametrize(("game", "steps"), [("TicTacToe-v0", 12), ("Nim-v0", 20), ("PegJump-v0", 40)])
def test_the_figures_of_the_page(game: str, steps: int) -> None:
    settings = TextArena(game=game, max_steps=steps)
    n_random, score = random_play(settings, 100)
    plans = [plan for task in list(settings.tasks("test"))[:100] if (plan := settings.plan(task, ()))]
    mean = sum(map(len, plans)) / len(plans)
    page = (ROOT / "docs/environments/textarena.md").read_text(encoding="utf-8")
    row = f"| `{game}` | {steps} | {n_random} of 100 | {score:.2f} | {len(plans)} of 100 | {mean:.1f} |\n"
    assert row in page
