"""Objectives: look-ups in turn and together, chains of another environment's tasks, and what is promised of both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.base import StepResult
from environments.check import check_environment
from environments.contrib.composite_episode import tasks_of
from environments.contrib.composite_tasks import Facts, LookUps, Objective, Objectives
from environments.games.key_door import Keyhole
from environments.wrappers.difficulty_levels import Graded
from rlhf.data import Message, Role, Task
from rlhf.errors import EnvError
from tests.environments.worlds import figures, is_shown, oracle_play, page, play, transcript

FACTS = Facts(
    people=(
        ("Ben", "Ben: city Oslo, job nurse, pet cat, friend Mia."),
        ("Mia", "Mia: city Rome, job cook, pet dog, friend Ben."),
    ),
    ways=(("Mia",), ("Mia", "Ben")),
    objectives=(
        Objective("the job of Mia", "job", "cook"),
        Objective("the pet of the friend of Mia", "pet", "cat"),
    ),
)


def look(*actions: str, together: bool = False, max_steps: int = 8) -> tuple[LookUps, list[StepResult]]:
    episode = LookUps(FACTS, is_together=together, max_steps=max_steps)
    return episode, [episode.opening, *map(episode.act, actions)]


# --- look-ups --------------------------------------------------------------------------------------------------------


def test_look_ups_in_turn() -> None:
    _, results = look("look up Mia", "answer cook", "look up Ben", "answer cat")
    assert [result.reply for result in results] == [
        "Objective 1 of 2: the job of Mia.",
        "Mia: city Rome, job cook, pet dog, friend Ben.",
        "Objective 2 of 2: the pet of the friend of Mia.",
        "Ben: city Oslo, job nurse, pet cat, friend Mia.",
        "The end.",
    ]
    assert [result.reward for result in results] == [0, 0, 0.5, 0, 0.5]
    assert [result.success for result in results] == [None] * 4 + [True]
    assert len({result.state_key for result in results}) == 5
    assert results[0].admissible_actions == (
        "answer baker", "answer cook", "answer doctor", "answer farmer", "answer miner", "answer nurse", "answer pilot",
        "answer tailor", "look up Ben", "look up Mia",
    )  # fmt: skip


def test_look_ups_together_are_answered_at_the_end() -> None:
    _, results = look("look up Mia", "look up Ben", "answer cook; cat", together=True)
    assert results[0].reply == "Find 2: 1 the job of Mia; 2 the pet of the friend of Mia."
    assert [result.reward for result in results] == [0, 0, 0, 1]
    assert results[-1].success and results[-1].reply == "The end."
    assert not any(result.admissible_actions for result in results)


@pytest.mark.parametrize(
    ("action", "score", "valid"),
    [
        # Right answers are "cook" and "cat"; as in MEM1, "a;x" for "a;b" is worth one half.
        ("answer cook; cat", 1, True), ("Answer: the cook; a cat.", 1, True), ("cook;cat", 1, True),
        ("answer cook; dog", 0.5, True), ("answer cook", 0.5, True), ("answer ; cat", 0.5, True),
        ("answer cook; cat; dog", 1, True), ("answer cat; cook", 0, True), ("answer cook nurse; cat", 0.5, True),
        ("answer", 0, True), ("cook and cat", 0, False), ("", 0, False), ("cook; then the pet", 0, False),
    ],
)  # fmt: skip
def test_answers_together_count_by_their_place(action: str, score: float, valid: bool) -> None:
    episode, results = look(action, together=True)
    assert (episode.score, results[-1].valid, episode.done) == (score, valid, valid)
    assert results[-1].success == ((score == 1) if valid else None)


@pytest.mark.parametrize(
    ("action", "reply", "valid"),
    [
        ("Look up  mia.", "Mia: city", True), ("lookup Mia", "Mia: city", True), ("Mia", "Mia: city", True),
        ("search[Mia]", "Mia: city", True), ("look up Zoe", "Nobody of that name.", True),
        ("look up Mia and Ben", "Nobody of that name.", True), ("the answer is cook", "Objective 2", True),
        ("cook", "Objective 2", True), ("answer Rome", "Objective 2", True), ("I like Mia", "Unknown action.", False),
        ("a cook or a nurse", "Unknown action.", False), ("look", "Unknown action.", False),
    ],
)  # fmt: skip
def test_actions_are_read_tolerantly(action: str, reply: str, valid: bool) -> None:
    _, results = look(action)
    assert results[-1].reply.startswith(reply) and results[-1].valid is valid


def test_the_reference_is_all_answers() -> None:
    world = Objectives(k=3, mode="together")
    [task, *_] = world.tasks("test")
    assert task.reference is not None and world.start(task).opening.reply.count(" of ") == 3
    assert play(world, task, [f"answer {task.reference}"])[-1].success


def test_a_wrong_answer_is_not_told_and_cannot_be_made_good() -> None:
    episode, results = look("answer nurse")
    assert results[-1].reply == "Objective 2 of 2: the pet of the friend of Mia." and results[-1].reward == 0
    assert episode.way_out() is None


def test_steps_run_out() -> None:
    _, results = look("look up Mia", "look up Mia", max_steps=2)
    assert (results[-1].truncated, results[-1].terminated, results[-1].success) == (True, False, False)
    assert look(max_steps=4)[0].way_out() is None  # five actions are needed: who is Mia's friend is read again
    assert look(max_steps=5)[0].way_out() == (
        "look up Mia", "answer cook", "look up Mia", "look up Ben", "answer cat"
    )  # fmt: skip


@given(
    k=st.integers(1, 12),
    hops=st.integers(1, 3),
    mode=st.sampled_from(["in_turn", "together"]),
    seed=st.integers(0, 29_999_999),
)
@settings(max_examples=40)
def test_the_oracle_reads_and_answers(k: int, hops: int, mode: Any, seed: int) -> None:
    world = Objectives(k=k, hops=hops, mode=mode, steps_each=4)
    task = Task("objectives", seed=seed)
    plan = world.plan(task, ())
    assert plan is not None and len(plan) <= k * (hops + 1)
    results = play(world, task, plan)
    assert results[-1].success and sum(result.reward for result in results) == pytest.approx(1)
    i = seed % len(plan)
    rest = world.plan(task, plan[:i])
    assert rest is not None and play(world, task, [*plan[:i], *rest])[-1].success


def test_k_goes_beyond_what_was_trained_on() -> None:
    few, many = Objectives(k=2), Objectives(k=16)
    assert (few.max_steps, many.max_steps) == (8, 64)
    assert oracle_play(many, 5) == (5, 32)
    with pytest.raises(ValueError, match="allow 24 objectives, and k is 25"):
        Objectives(k=25)
    assert Objectives(k=25, n_people=9).max_steps == 100


@pytest.mark.parametrize("keys", [{"k": 1}, {"k": 4}, {"k": 16, "hops": 2}])
def test_what_the_page_says_of_random_play_and_the_oracle(keys: dict[str, int]) -> None:
    label = ", ".join(f"{name}: {value}" for name, value in keys.items())
    assert figures(Objectives(**keys), f"`{label}`") in page()  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["in_turn", "together"])
def test_the_transcripts_of_the_page(mode: Any) -> None:
    world = Objectives(mode=mode)
    task = world.tasks("test")[0]
    plan = world.plan(task, ())
    assert plan is not None and is_shown(transcript(play(world, task, plan), plan))


# --- chains of another environment's tasks ---------------------------------------------------------------------------

HOUSES = Keyhole(rows=2, columns=2, loops=4, n_train=7, n_test=4, max_steps=10)


def test_a_chain_is_k_tasks_in_their_order() -> None:
    chains = Objectives(environment=HOUSES, k=3).tasks("train")
    assert [[task.seed for task in tasks_of(chain)] for chain in chains] == [[0, 1, 2], [3, 4, 5]]  # one is left over
    assert [own for chain in chains for own in tasks_of(chain)] == list(HOUSES.tasks("train"))[:6]
    assert len(Objectives(environment=HOUSES, k=3, n_train=1).tasks("train")) == 1
    with pytest.raises(EnvError, match="too few tasks for one chain"):
        Objectives(environment=HOUSES, k=5).tasks("test")
    with pytest.raises(EnvError, match="another environment"):
        Objectives(environment=HOUSES).start(Task("keyhole/0"))


def walk(world: Objectives, plans: Sequence[Sequence[str]]) -> list[StepResult]:
    return play(world, world.tasks("train")[0], [action for plan in plans for action in plan])


def plans_of(world: Objectives) -> list[Sequence[str]]:
    assert world.environment is not None
    plans = [HOUSES.plan(task, ()) for task in tasks_of(world.tasks("train")[0])]
    return [plan for plan in plans if plan is not None]


def test_in_turn_an_objective_begins_where_the_one_before_ends() -> None:
    world = Objectives(environment=HOUSES, k=2)
    first, second = plans_of(world)
    results = walk(world, [first, second])
    assert results[0].reply.startswith("Objective 1 of 2. Find the key")
    assert results[len(first)].reply.startswith("The door opens.\nObjective 2 of 2. Find the key")
    assert [r.reward for r in results if r.reward] == [0.5, 0.5]
    assert [r.success for r in results] == [None] * (len(results) - 1) + [True]
    assert results[-1].terminated and world.max_steps == 20


def test_an_objective_that_runs_out_of_steps_is_followed_by_the_next() -> None:
    world = Objectives(environment=HOUSES, k=2)
    results = walk(world, [["dance"] * 10, plans_of(world)[1]])
    assert "Objective 2 of 2." in results[10].reply and not results[10].truncated
    assert (results[-1].terminated, results[-1].success, sum(r.reward for r in results)) == (True, False, 0.5)


def test_together_an_action_names_its_objective() -> None:
    world = Objectives(environment=HOUSES, k=2, mode="together")
    first, second = ([f"{i} {action}" for action in plan] for i, plan in enumerate(plans_of(world), 1))
    results = walk(world, [second, first])
    opening = results[0]
    assert opening.reply.count("Find the key and open the door.") == 2 and "\n2: " in opening.reply
    assert all(action[:2] in ("1 ", "2 ") for action in opening.admissible_actions)
    assert results[len(second)].reply.endswith("2 is over.")
    assert results[-1].success and results[-1].terminated


@pytest.mark.parametrize(
    ("action", "valid"),
    [("1: go north", True), ("Objective 2. open door", True), ("go north", False), ("3 go north", False), ("", False)],
)
def test_numbers_are_read_tolerantly(action: str, valid: bool) -> None:
    answer = walk(Objectives(environment=HOUSES, k=2, mode="together"), [[action]])[-1]
    assert answer.valid is valid
    assert valid or answer.reply == "Begin with the number of an objective that goes on: 1, 2."


@pytest.mark.parametrize(
    ("action", "own"),
    [
        ("1 -5", "-5"),
        ("1: .5", ".5"),
        ("1: -.5", "-.5"),
        ("1 - go", "go"),
        ("1-go", "go"),
        ("1) [go]", "[go]"),
        ("1 : go", "go"),
        ("Objective 1 : go", "go"),
        ("1 ) go", "go"),
        ("1. ) go", "go"),
        ("1 -- go", "go"),
        ("1 -look", "look"),
        ("1 - 5", "5"),
    ],
)
def test_a_sign_belongs_to_the_action_and_a_dash_to_the_number(action: str, own: str) -> None:
    world = Objectives(environment=Plain(), k=2, mode="together")
    chain: Any = world.start(world.tasks("dev")[0])
    asyncio.run(chain.step(action))
    assert chain.taken == [[own], []]


def test_steps_without_a_number_end_the_episode_too() -> None:
    last = walk(Objectives(environment=HOUSES, k=2, mode="together"), [["dance"] * 20])[-1]
    assert (last.truncated, last.terminated, last.success) == (True, False, False)


def test_a_semicolon_between_look_ups_answers_nothing() -> None:
    for said in ("look up Mia; look up Ben", "Look up Mia; after that I answer."):
        episode, (_, result) = look(said, together=True)
        assert not result.terminated and not episode.done, said
    assert result.reply.startswith("Mia: city Rome")


@given(mode=st.sampled_from(["in_turn", "together"]), cut=st.integers(0, 20), seed=st.integers(0, 10))
@settings(max_examples=10)
def test_a_chains_plan_goes_on_from_anywhere(mode: Any, cut: int, seed: int) -> None:
    world = Objectives(environment=replace(HOUSES, n_train=60), k=3, mode=mode)
    task = world.tasks("train")[seed]
    plan = world.plan(task, ())
    assert plan is not None
    rest = world.plan(task, plan[:cut])
    assert rest is not None and play(world, task, [*plan[:cut], *rest])[-1].success
    assert world.plan(task, ["1 dance"] * 10) is None  # the first objective is lost


class Plain:
    """An environment without an oracle, a step limit or state keys, whose steps wait."""

    def tasks(self, split: str) -> list[Task]:
        said = (Message(Role.USER, "Be polite."),)
        return [Task(f"plain/{i}", seed=i, messages=said, reference="yes", info={"n": i}) for i in range(4)]

    def start(self, task: Task) -> PlainEpisode:
        assert task.reference == "yes" and task.info == {"n": task.seed}
        return PlainEpisode()


class PlainEpisode:
    n_closed = 0

    def __init__(self) -> None:
        self.opening = StepResult("Say yes.")

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(0)
        return StepResult("Good.", reward=float(action == "yes"), terminated=True, success=action == "yes")

    async def close(self) -> None:
        PlainEpisode.n_closed += 1


def test_any_environment_can_be_joined() -> None:
    world = Objectives(environment=Plain(), k=4)
    assert world.max_steps is None
    PlainEpisode.n_closed = 0
    results = play(world, world.tasks("test")[0], ["yes", "no", "yes", "yes"])
    assert results[0].reply == "Objective 1 of 4. Be polite.\nSay yes." and results[0].state_key is None
    assert [r.reward for r in results] == [0, 0.25, 0, 0.25, 0.25] and results[-1].success is False
    assert PlainEpisode.n_closed == 4  # each once
    play(world, world.tasks("test")[0], ["yes"])
    assert PlainEpisode.n_closed == 6  # the one that was over, and the one that was not
    with pytest.raises(EnvError, match="cannot demonstrate"):
        world.plan(world.tasks("test")[0], ())


def test_an_episode_that_fails_keeps_no_other_open() -> None:
    class Angry(PlainEpisode):
        async def step(self, action: str) -> StepResult:
            raise EnvError("no such thing", where="Angry.step")

        async def close(self) -> None:
            await super().close()
            raise EnvError("cannot be closed", where="Angry.close")

    class World(Plain):
        def start(self, task: Task) -> PlainEpisode:
            return Angry() if task.seed == 0 else PlainEpisode()

        def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str]:
            return ("yes",)

    world = Objectives(k=2, mode="together", environment=World())
    PlainEpisode.n_closed = 0
    with pytest.raises(EnvError, match="cannot be closed"):
        world.plan(world.tasks("train")[0], ["1 yes"])
    assert PlainEpisode.n_closed == 2


def test_objectives_that_have_begun_are_closed_where_the_next_cannot_begin() -> None:
    closed: list[str] = []

    class Noted(PlainEpisode):
        async def close(self) -> None:
            closed.append("closed")
            raise EnvError("cannot be closed either", where="Noted.close")

    class Short(Plain):
        def start(self, task: Task) -> PlainEpisode:
            if closed or task.id != first.id:
                raise EnvError("no room is left", where="Short.start")
            return Noted()

    first = next(iter(Plain().tasks("train")))
    world = Objectives(k=2, mode="together", environment=Short())
    with pytest.raises(EnvError, match="no room is left"):
        world.start(next(iter(world.tasks("train"))))
    assert closed == ["closed"]


class Roomy(Plain):
    """The same, with room for seven episodes at a time, and calls that it limits itself."""

    max_episodes, keeps_limits, inline, demonstrates = 7, True, True, False

    def plan(self, task: Task, taken: Sequence[str]) -> list[str]:
        return ["yes"]


def test_what_an_environment_says_of_itself_holds_for_its_chains() -> None:
    in_turn, together = Objectives(environment=Roomy(), k=2), Objectives(environment=Roomy(), k=2, mode="together")
    assert (in_turn.max_episodes, together.max_episodes) == (7, 3)  # seven have room for three times two
    assert in_turn.keeps_limits and in_turn.inline and not in_turn.demonstrates
    with pytest.raises(EnvError, match="cannot demonstrate"):
        in_turn.plan(in_turn.tasks("test")[0], ())
    plain = Objectives(environment=Plain(), k=2, mode="together")
    assert plain.max_episodes is None and not plain.keeps_limits and not plain.inline and not plain.demonstrates
    assert Objectives().inline and Objectives().demonstrates and Objectives(environment=HOUSES).demonstrates


class Suggesting(Roomy):
    """The same, with suggestions and two tools, one in each second task."""

    agent_defaults, limits_defaults = {"format": "text"}, {"max_turns": 3, "max_tokens": 9}

    def tasks(self, split: str) -> list[Task]:
        return [
            Task(f"s/{i}", seed=i, info={"tools": [{"name": "ab"[i % 2]}], "plain_answer": i < 2}) for i in range(4)
        ]


def test_suggestions_and_tools_of_an_environment_reach_the_agent_of_its_chains() -> None:
    world, alone = Objectives(environment=Suggesting(), k=2), Objectives()
    assert world.agent_defaults == {"format": "text"} and world.limits_defaults == {"max_turns": 6, "max_tokens": 9}
    assert alone.agent_defaults == alone.limits_defaults == {}
    one, other = world.tasks("train")
    assert one.info["tools"] == other.info["tools"] == [{"name": "a"}, {"name": "b"}]
    assert one.info["plain_answer"] is True and "plain_answer" not in other.info
    together = replace(world, mode="together").tasks("train")[0]
    assert set(together.info) == {"objectives"}  # a call could not tell for which
    assert set(Objectives(environment=HOUSES, k=2).tasks("train")[0].info) == {"objectives"}


class Seated(Plain):
    """The same for two seats: the first is asked, the second answers."""

    def start(self, task: Task) -> PlainEpisode:
        episode = PlainEpisode()
        episode.opening = StepResult("Say yes.", seat="first")
        return episode


def test_the_seat_is_that_of_the_objective_in_turn() -> None:
    world = Objectives(environment=Seated(), k=2)
    results = play(world, world.tasks("dev")[0], ["yes", "yes"])
    assert [result.seat for result in results] == ["first", "first", ""]
    PlainEpisode.n_closed = 0
    with pytest.raises(EnvError, match="several seats"):
        replace(world, mode="together").start(world.tasks("dev")[0])
    assert PlainEpisode.n_closed == 1


def test_a_key_tells_which_objectives_are_over() -> None:
    short = Keyhole(rows=2, columns=2, max_steps=2, n_train=40)
    opening, once, twice = walk(Objectives(environment=short, k=2, mode="together"), [["1 dance", "1 dance"]])
    assert opening.state_key == once.state_key and once.admissible_actions == opening.admissible_actions
    assert twice.state_key != once.state_key and twice.admissible_actions != once.admissible_actions


def test_keys_of_look_ups_mean_nothing_beside_an_environment() -> None:
    with pytest.raises(ValueError, match="hops is for look-ups"):
        Objectives(environment=HOUSES, hops=2)
    with pytest.raises(ValueError, match="takes 3 steps"):
        Objectives(hops=2, steps_each=2)


@pytest.mark.parametrize(
    "world",
    [
        Objectives(),
        Objectives(mode="together", hops=2, k=3),
        Objectives(environment=Keyhole(n_train=8, n_dev=4, n_test=4), k=2),
        Objectives(environment=Keyhole(n_train=8, n_dev=4, n_test=4), k=2, mode="together"),
        Objectives(environment=Graded(levels=(HOUSES, Keyhole(n_train=4, n_dev=4, n_test=4))), k=2),
    ],
)
def test_all_promises_are_kept(world: Objectives) -> None:
    report = check_environment(world, other_process=world.environment is None)
    assert report.ok, str(report)
