"""Sokoban: rooms, moves, what is said, and a solver that is compared with another."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.base import StepResult
from environments.games.sokoban import Position, Room, Sokoban, SokobanEpisode, moved, pulled, read_move, solve
from rlhf.data import Task
from rlhf.errors import EnvError

#: #####
#: #PXO#   one push to the right solves it; a box in the lower corners is lost
#: #___#
#: #####
SMALL = Room(floor=tuple((r, c) for r in (1, 2) for c in (1, 2, 3)), goals=((1, 3),))
START = Position((1, 1), frozenset({(1, 2)}))

levels = st.builds(
    Sokoban, rows=st.integers(5, 7), columns=st.integers(5, 7), boxes=st.integers(1, 2), pulls=st.integers(1, 8),
    max_steps=st.just(500),
)  # fmt: skip
seeds = st.integers(0, 30_000_000)


def small(max_steps: int = 10, **keys: object) -> SokobanEpisode:
    return SokobanEpisode(Sokoban(max_steps=max_steps, **keys), SMALL, START)  # type: ignore[arg-type]


def do(episode: SokobanEpisode, moves: Sequence[str]) -> list[StepResult]:
    return [episode.opening, *(asyncio.run(episode.step(move)) for move in moves)]


def fewest(room: Room, start: Position) -> int | None:
    """The moves of a shortest solution, by flooding all positions: another way than the one under test."""
    floor, goals = frozenset(room.floor), frozenset(room.goals)
    far, queue = {start: 0}, deque([start])
    while queue:
        at = queue.popleft()
        if at.boxes == goals:
            return far[at]
        for move in ("down", "left", "right", "up"):
            after = moved(floor, at, move)
            if after is not None and after not in far:
                far[after] = far[at] + 1
                queue.append(after)
    return None


@given(levels, seeds)
@settings(max_examples=40)
def test_a_room_is_one_whole_and_begins_unsolved(world: Sokoban, seed: int) -> None:
    room = world.draw(random.Random(seed))
    start = pulled(room, world.pulls, seed)
    floor = set(room.floor)
    assert all(0 < r < world.rows - 1 and 0 < c < world.columns - 1 for r, c in floor)
    reached, edge = {min(floor)}, [min(floor)]
    while edge:
        r, c = edge.pop()
        for cell in ((r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)):
            if cell in floor - reached:
                reached.add(cell)
                edge.append(cell)
    assert reached == floor
    assert len(room.goals) == len(start.boxes) == world.boxes
    assert start.player in floor - start.boxes and start.boxes <= floor and start.boxes != frozenset(room.goals)


@given(levels, seeds, st.integers(0, 12))
@settings(max_examples=40)
def test_the_oracle_takes_the_fewest_moves_from_anywhere_or_knows_none(world: Sokoban, seed: int, n: int) -> None:
    room = world.draw(random.Random(seed))
    floor, at, rng = frozenset(room.floor), pulled(room, world.pulls, seed), random.Random(seed)
    assert solve(room, at) is not None  # what was pulled can be pushed back
    for _ in range(n):
        at = moved(floor, at, rng.choice(["down", "left", "right", "up"])) or at
    path = solve(room, at)
    assert (None if path is None else len(path)) == fewest(room, at)
    for move in path or ():
        after = moved(floor, at, move)
        assert after is not None
        at = after
    assert path is None or at.boxes == frozenset(room.goals)


def test_a_whole_game() -> None:
    opening, blocked, solved = do(small(), ["left", "right"])
    assert opening.reply.endswith("Moves: down, left, right, up.\n######\n#PXO##\n#___##\n######\n######\n######")
    assert opening.admissible_actions == ("down", "right")
    assert blocked.reply.startswith("Nothing moves.\n######\n#PXO##") and blocked.valid
    assert blocked.state_key == opening.state_key
    assert solved == StepResult(
        "Every box is on a goal.", reward=1.0, terminated=True, state_key=solved.state_key, success=True
    )


def test_boxes_and_the_player_on_goals_have_marks_of_their_own() -> None:
    episode = SokobanEpisode(Sokoban(), SMALL, Position((1, 3), frozenset({(1, 2)})))
    assert "#_XS##" in episode.picture()
    two = Room(SMALL.floor, ((1, 3), (2, 1)))
    assert (
        "#PXO##\n#B__##"
        in SokobanEpisode(Sokoban(boxes=2), two, Position((1, 1), frozenset({(1, 2), (2, 1)}))).picture()
    )


def test_a_lost_box_leaves_no_plan_and_the_episode_goes_on() -> None:
    # From above the box is pushed into the lower row, where no wall lets it be pushed up again.
    room = Room(tuple((r, c) for r in (1, 2, 3) for c in (1, 2, 3)), ((1, 2),))
    start = Position((1, 1), frozenset({(2, 2)}))
    after = Position((2, 2), frozenset({(3, 2)}))
    assert solve(room, start) is not None and solve(room, after) is None
    episode = SokobanEpisode(Sokoban(max_steps=3), room, start)
    last = do(episode, ["right", "down", "up"])[-1]
    assert (last.terminated, last.truncated, last.success) == (False, True, False)
    with pytest.raises(EnvError, match="the episode is over"):
        asyncio.run(episode.step("up"))


def test_rewards_of_boxes_come_and_go_with_them() -> None:
    two = Room(tuple((r, c) for r in (1, 2, 3) for c in (1, 2, 3, 4)), ((1, 3), (3, 1)))
    start = Position((1, 1), frozenset({(1, 2), (2, 2)}))
    episode = SokobanEpisode(Sokoban(boxes=2, reward="boxes"), two, start)
    # Onto the goal, over it, and away: of two boxes each is worth a half.
    assert [result.reward for result in do(episode, ["right", "right", "left"])] == [0, 0.5, -0.5, 0]


def test_no_plan_where_too_few_steps_are_left() -> None:
    world = Sokoban(n_test=5)
    task = world.tasks("test")[0]
    plan = world.plan(task, [])
    assert plan is not None and len(plan) > 1
    hasty = Sokoban(n_test=5, max_steps=len(plan))
    assert hasty.plan(task, []) == plan
    assert hasty.plan(task, ["dance"]) is None
    assert hasty.plan(task, plan) == ()


@pytest.mark.parametrize(
    ("text", "move"),
    [("up", "up"), ("Move_left.", "left"), ("push right", "right"), ("D", "down"), ("north", "up"), ("", None),
     ("up up", None)],
)  # fmt: skip
def test_moves_are_read_tolerantly(text: str, move: str | None) -> None:
    assert read_move(text) == move


def test_opening_of_a_known_task() -> None:
    world = Sokoban(n_test=4)
    assert world.start(world.tasks("test")[3]).picture() == "######\n#___##\n#__XO#\n#_#_P#\n#_##_#\n######"
    assert Task(world.tasks("test")[3].id, seed=world.tasks("test")[3].seed) == world.tasks("test")[3]
