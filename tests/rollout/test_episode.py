from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pytest

from agents.base import History, PolicyHandle
from agents.chat import ChatAgent
from environments.base import StepResult
from rlhf.data import Action, Finish, Generation, Message, Outcome, Prompt, Role, SamplingParams, Task
from rlhf.errors import ContextFull, EngineError
from rlhf.inference.scripted import ScriptedEngine
from rlhf.inference.seeds import stable_seed
from rlhf.rollout.episode import run_episode
from rlhf.rollout.limits import Limits
from rlhf.rollout.policy_client import EpisodeMonitor
from rlhf.rollout.renderer import Renderer
from tests.rollout.small_world import CHATML, INLINE, ONE_THREAD, THINKING, THREADS, Corridor, Plain, tokenizer, user
from tests.rollout.trouble import Synchronous, Troubled, blocks, is_slow, raises, waits

FAST = Limits(step_timeout_s=20.0, start_timeout_s=20.0, episode_timeout_s=60.0)
IMPATIENT = Limits(step_timeout_s=0.4, start_timeout_s=0.4, episode_timeout_s=60.0)
TASK = Task("corridor/test/0", reference="secret")


def north(**kwargs):
    return ScriptedEngine(lambda text: "go north", tokenizer=tokenizer(), **kwargs)


def play(environment=None, agent=None, engine=None, limits=FAST, task=TASK, **kwargs):
    engine = engine or north()
    arguments = (environment or Corridor(), agent or Plain(), engine, Renderer(tokenizer()), limits, SamplingParams())
    trajectory = asyncio.run(run_episode(task, *arguments, **kwargs))
    assert not engine.sessions  # released on every path
    return trajectory


def test_a_solved_episode():
    environment = Corridor(length=2)
    got = play(environment, attempt=3)
    assert (got.task_id, got.attempt, got.opening, got.outcome) == (TASK.id, 3, "Room 0 of 0.", Outcome.SOLVED)
    assert [t.reply for t in got.turns] == ["Room 1 of 0.", "Room 2 of 0."]
    assert [t.state_key for t in got.turns] == ["room 0", "room 1"]  # the state in which the action was chosen
    assert [t.reward for t in got.turns] == [0.0, 1.0]
    assert all(t.valid and t.action.text == "go north" for t in got.turns)
    assert (environment.counts.started, environment.counts.closed) == (1, 1)
    assert got.duration_s > 0


@dataclass(frozen=True)
class Ending(Corridor):
    end: StepResult | None = None

    def start(self, task):
        episode = super().start(task)

        async def step(action):
            return self.end

        episode.step = step
        return episode


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (StepResult("x", terminated=True, success=True), Outcome.SOLVED),
        (StepResult("x", terminated=True, success=False), Outcome.FAILED),
        (StepResult("x", terminated=True), Outcome.FAILED),
        (StepResult("x", truncated=True), Outcome.TURN_LIMIT),
        (StepResult("x", truncated=True, success=True), Outcome.SOLVED),
        (StepResult("x"), Outcome.TURN_LIMIT),
        (StepResult("x", reward=np.float32(0.5), terminated=np.bool_(True), success=np.bool_(True)), Outcome.SOLVED),
    ],
)
def test_how_an_episode_ends(end, outcome):
    got = play(Ending(end=end), limits=replace(FAST, max_turns=3))
    assert got.outcome is outcome
    assert len(got.turns) == (1 if end.terminated or end.truncated else 3)
    assert type(got.turns[0].reward) is float


def test_the_reference_is_hidden_from_the_agent_and_given_to_the_environment():
    seen = []

    class Curious(Plain):
        async def act(self, history, policy):
            seen.append(history.task)
            return await super().act(history, policy)

    class World(Corridor):
        def start(self, task):
            seen.append(task)
            return super().start(task)

    play(World(), Curious())
    assert seen[0] == TASK
    assert seen[1] == replace(TASK, reference=None)


def test_what_cannot_be_parsed_is_read_by_the_agent_and_costs_a_turn():
    said = iter(["", "go north", "", "go north", "go north"])
    environment = Corridor()
    got = play(environment, engine=ScriptedEngine(lambda text: next(said), tokenizer=tokenizer()))
    assert [t.valid for t in got.turns] == [False, True, False, True, True]
    assert [t.reply for t in got.turns][:3] == ["Say something.", "Room 1 of 0.", "Say something."]
    assert [t.state_key for t in got.turns] == ["room 0", "room 0", "room 1", "room 1", "room 2"]
    assert got.outcome is Outcome.SOLVED
    never = play(engine=ScriptedEngine(lambda text: "", tokenizer=tokenizer()), limits=replace(FAST, max_turns=4))
    assert (never.outcome, len(never.turns)) == (Outcome.TURN_LIMIT, 4)


def test_the_agent_can_rebuild_its_earlier_prompts():
    seen = []

    class Watching(Plain):
        async def act(self, history, policy):
            seen.append(history)
            return await super().act(history, policy)

    play(agent=Watching())
    for turn, history in enumerate(seen):
        assert len(history.turns) == turn
        assert history.admissible_actions == ("go north", "look")
        assert history.admissible_before == (("go north", "look"),) * turn


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_through_five_turns_every_prompt_holds_the_ids_as_they_were_sampled(template):
    made = tokenizer(template)
    renderer = Renderer(made)
    letters = [i for c in "go north" for i in made.encode(c, add_special_tokens=False)]
    assert letters != made.encode("go north", add_special_tokens=False)
    head = made.encode("<think>\nhm\n</think>\n\n", add_special_tokens=False) if template == THINKING else []
    # Turns end by a stop id and by the limit in turn.
    engine = ScriptedEngine(lambda ids: (*head, *letters, *(renderer.stop_ids[:1] if len(ids) % 2 else letters)))
    limits = replace(FAST, max_turns=5, max_tokens=len(head) + len(letters) + 1)
    arguments = (Corridor(length=9), Plain(), engine, renderer, limits, SamplingParams())
    got = asyncio.run(run_episode(TASK, *arguments))
    assert len(got.turns) == 5
    for before, after in zip(got.generations, got.generations[1:], strict=False):
        assert before.token_ids[: len(head) + len(letters)] == (*head, *letters)
        assert Renderer.extends(before, after.prompt)


def test_each_call_has_a_seed_of_its_own():
    params = []

    class Seen(ScriptedEngine):
        async def generate(self, prompt, given, session=""):
            params.append(given)
            return await super().generate(prompt, given, session)

    class Twice(Plain):
        async def act(self, history, policy):
            first = await policy.generate([user("a")], max_tokens=7)
            second = await policy.generate([user("b")], max_tokens=999)
            return Action("go north", (first.generation, second.generation))

    def run(**kwargs):
        params.clear()
        play(Corridor(length=2), Twice(), Seen(lambda t: "x", tokenizer=tokenizer()), **kwargs)
        return [p.seed for p in params]

    seeds = run(seed=5, attempt=2)
    assert seeds == [stable_seed(5, 2, turn, call) for turn in (0, 1) for call in (0, 1)]
    assert [p.max_tokens for p in params] == [7, 64, 7, 64]  # an agent may ask for less than limits.max_tokens
    assert len({*seeds, *run(seed=5, attempt=3), *run(seed=6, attempt=2)}) == 12


def test_a_full_context_ends_the_episode_as_the_policys_doing():
    limits = replace(FAST, max_context=60)
    got = play(Corridor(length=99), limits=limits)
    assert got.outcome is Outcome.TOKEN_LIMIT
    assert "60" in got.detail
    assert got.turns
    assert all(len(g.full_ids) <= 60 for g in got.generations)
    assert play(engine=north(max_context=60), limits=FAST, environment=Corridor(length=99)).turns == got.turns
    none = play(limits=replace(FAST, max_context=3))
    assert (none.outcome, none.turns) == (Outcome.TOKEN_LIMIT, ())


def test_an_agent_may_answer_a_full_context_with_a_shorter_prompt():
    class Forgetful(Plain):
        async def act(self, history, policy):
            try:
                return await super().act(history, policy)
            except ContextFull:
                reply = await policy.generate([user(history.observation)])
                return Action(reply.text, (reply.generation,))

    assert play(Corridor(length=9), Forgetful(), limits=replace(FAST, max_context=60)).outcome is Outcome.SOLVED


def test_what_was_sampled_for_a_turn_that_ran_out_of_context_is_kept():
    class Planner(Plain):
        async def act(self, history, policy):
            plan = await policy.generate([user("plan")])
            reply = await policy.generate([user("x" * 500)])
            return Action(reply.text, (plan.generation, reply.generation))

    got = play(agent=Planner(), limits=replace(FAST, max_context=60))
    assert got.outcome is Outcome.TOKEN_LIMIT
    assert len(got.turns) == len(got.generations) == 1
    assert not got.turns[0].valid and not got.turns[0].action.notes

    class Seated(Corridor):
        def start(self, task):
            episode = super().start(task)
            episode.opening = replace(episode.opening, seat="player 1")
            return episode

    got = play(Seated(), Planner(), limits=replace(FAST, max_context=60))
    assert got.turns[0].action.notes == {"seat": "player 1"}


@pytest.mark.parametrize("properties", [INLINE, THREADS, ONE_THREAD], ids=["inline", "threads", "one thread"])
@pytest.mark.parametrize(
    ("trouble", "detail"),
    [
        (raises, "ValueError: the door is stuck (trouble.py:"),
        (lambda e: "a room", "the returned object is not a StepResult"),
        (lambda e: StepResult("x", reward=float("nan")), "reward is no finite number"),
        (lambda e: StepResult("x", reward=None), "reward is no finite number"),
        (lambda e: StepResult(None), "reply is no text"),
        (lambda e: StepResult("x", state_key=3), "state_key is neither"),
        (lambda e: StepResult("x", admissible_actions=(1,)), "admissible_actions is no tuple of texts"),
        (lambda e: StepResult("x", admissible_actions=None), "admissible_actions is no tuple of texts"),
        (lambda e: sys.exit("bye"), "SystemExit: bye"),
        (lambda e: next(iter(())), "StopIteration"),
    ],
)
def test_an_environment_that_goes_wrong(properties, trouble, detail):
    environment = Troubled(properties=properties, trouble=trouble)
    got = play(environment)
    assert got.outcome is Outcome.ENV_ERROR
    assert detail in got.detail
    assert len(got.turns) == 1  # what happened before is on the record
    assert environment.counts.closed == 1


@pytest.mark.parametrize("properties", [THREADS, ONE_THREAD], ids=["threads", "one thread"])
@pytest.mark.parametrize("trouble", [blocks, waits], ids=["blocks", "waits"])
def test_an_environment_that_hangs(properties, trouble):
    environment = Troubled(properties=properties, trouble=trouble)
    begun = time.monotonic()
    got = play(environment, limits=IMPATIENT)
    assert got.outcome is Outcome.TIMEOUT
    assert got.detail == "step: no answer within 0.4 s"
    assert time.monotonic() - begun < 10
    assert environment.counts.closed == 1
    environment.released.set()


def test_an_inline_environment_that_waits_too_long_is_cut_too():
    environment = Troubled(properties=INLINE, trouble=waits)
    assert play(environment, limits=IMPATIENT).outcome is Outcome.TIMEOUT
    assert environment.counts.closed == 1


def test_an_environment_that_cancels_itself_does_not_cancel_the_run():
    def cancels(environment):
        raise asyncio.CancelledError

    assert play(Troubled(properties=THREADS, trouble=cancels)).outcome is Outcome.ENV_ERROR


@pytest.mark.parametrize("properties", [INLINE, THREADS], ids=["inline", "threads"])
def test_a_start_that_goes_wrong(properties):
    got = play(Troubled(properties=properties, trouble=raises, in_start=True))
    assert (got.outcome, got.turns, got.opening) == (Outcome.ENV_ERROR, (), "")
    assert "start: ValueError" in got.detail

    class Empty(Corridor):
        def start(self, task):
            return None

    got = play(Empty(properties=properties))
    assert got.outcome is Outcome.ENV_ERROR
    assert "NoneType without step and close" in got.detail


def test_a_start_that_returns_after_everybody_left_is_closed():
    environment = Troubled(properties=THREADS, trouble=blocks, in_start=True)
    got = play(environment, limits=IMPATIENT)
    assert (got.outcome, got.detail) == (Outcome.TIMEOUT, "start: no answer within 0.4 s")
    assert environment.counts.started == 0
    environment.released.set()
    wait_until(lambda: environment.counts.started == environment.counts.closed == 1)


def test_a_close_that_goes_wrong_is_told_and_changes_nothing_else():
    class Sticky(Corridor):
        def start(self, task):
            episode = super().start(task)

            def close():
                raise OSError("the door will not close")

            episode.close = close
            return episode

    got = play(Sticky())
    assert got.outcome is Outcome.SOLVED
    assert "close: OSError: the door will not close" in got.detail


def test_plain_functions_are_an_environment_and_stay_in_one_thread():
    environment = Synchronous()
    got = play(environment)
    assert got.outcome is Outcome.SOLVED
    assert environment.n_closed == 1
    assert len(environment.threads) == 1
    assert threading.get_ident() not in environment.threads


class Acts:
    """An agent made of one function."""

    def __init__(self, function):
        self.function = function

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        return await self.function(history, policy)


async def _breaks(history, policy):
    raise KeyError("plan")


async def _says_text(history, policy):
    return "go north"


async def _forgets_generations(history, policy):
    reply = await policy.generate([user("x")])
    return Action(reply.text)


async def _says_a_number(history, policy):
    return Action(3)


async def _renders_nothing(history, policy):
    await policy.generate([])


async def _times_out(history, policy):
    raise TimeoutError


@pytest.mark.parametrize(
    ("function", "detail"),
    [
        (_breaks, "KeyError: 'plan' (test_episode.py:"),
        (_says_text, "returned str, expected rlhf.data.Action"),
        (_forgets_generations, "1 of 1 generations are missing from Action.generations"),
        (_says_a_number, "Action.text is no text"),
        (_renders_nothing, "the prompt before the first reply is empty"),
        (_times_out, "TimeoutError"),
    ],
)
def test_an_agent_that_goes_wrong(function, detail):
    environment = Corridor()
    got = play(environment, Acts(function))
    assert got.outcome is Outcome.AGENT_ERROR
    assert detail in got.detail
    assert environment.counts.closed == 1


def test_an_agent_may_sample_in_parallel_and_the_engines_failure_stays_the_engines():
    async def in_parallel(history, policy):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(policy.generate([user(w)])) for w in ("a", "b")]
        return Action("go north", tuple(t.result().generation for t in tasks))

    assert play(agent=Acts(in_parallel)).outcome is Outcome.SOLVED
    assert play(agent=Acts(in_parallel), engine=north(fails_on={1})).outcome is Outcome.ENGINE_ERROR

    async def rewords(history, policy):
        try:
            return await Plain().act(history, policy)
        except EngineError as error:
            raise RuntimeError("no luck") from error

    assert play(agent=Acts(rewords), engine=north(fails_on={1})).outcome is Outcome.ENGINE_ERROR


class Odd(ScriptedEngine):
    """Answers what it was not asked."""

    def __init__(self, answer):
        super().__init__(lambda ids: (5,))
        self.answer = answer

    async def generate(self, prompt, params, session=""):
        await super().generate(prompt, params, session)
        return self.answer(prompt)


@pytest.mark.parametrize(
    ("engine", "detail"),
    [
        (north(fails_on={0}), "scripted to fail"),
        (Odd(lambda prompt: None), "returned NoneType, expected Generation"),
        (Odd(lambda prompt: Generation(prompt, (), (), Finish.ABORT, 0)), "aborted the generation"),
        (Odd(lambda prompt: Generation(Prompt((1,)), (5,), (0.0,), Finish.STOP, 0)), "another prompt"),
        (Odd(lambda prompt: Generation(prompt, (5,) * 99, (0.0,) * 99, Finish.STOP, 0)), "at most 64"),
        (Odd(lambda prompt: 1 // 0), "ZeroDivisionError"),
    ],
)
def test_an_engine_that_goes_wrong(engine, detail):
    environment = Corridor()
    got = play(environment, engine=engine)
    assert got.outcome is Outcome.ENGINE_ERROR
    assert detail in got.detail
    assert environment.counts.closed == 1


def test_an_engine_that_never_answers_is_cut_and_named():
    environment = Corridor()
    got = play(environment, engine=north(latency_s=60), limits=replace(FAST, episode_timeout_s=0.2))
    assert got.outcome is Outcome.TIMEOUT
    assert got.detail == "the episode took longer than 0.2 s; it waited for the engine"
    assert environment.counts.closed == 1


@pytest.mark.parametrize("trouble", [blocks, waits], ids=["blocks", "waits"])
def test_the_limit_of_the_whole_episode_holds_whatever_the_environment_does(trouble):
    environment = Troubled(properties=THREADS, trouble=trouble)
    got = play(environment, limits=replace(FAST, episode_timeout_s=0.5))
    assert got.outcome is Outcome.TIMEOUT
    assert got.detail == "the episode took longer than 0.5 s; it waited for the environment"
    assert environment.counts.closed == 1
    environment.released.set()


@pytest.mark.parametrize("properties", [INLINE, THREADS, ONE_THREAD], ids=["inline", "threads", "one thread"])
def test_slow_is_not_hung(properties):
    assert play(Troubled(properties=properties, trouble=is_slow)).outcome is Outcome.SOLVED


@pytest.mark.parametrize("where", ["engine", "environment", "blocked environment"])
def test_cancelling_cleans_up(where):
    engine = north(latency_s=60 if where == "engine" else 0)
    trouble = blocks if where.startswith("blocked") else waits
    environment = Troubled(properties=THREADS, trouble=trouble, at=0 if where != "engine" else 99)

    async def run():
        arguments = (environment, Plain(), engine, Renderer(tokenizer()), Limits(), SamplingParams())
        watch = EpisodeMonitor()
        episode = asyncio.create_task(run_episode(TASK, *arguments, watch=watch))
        while environment.counts.started == 0 or (where == "engine") != (watch.phase == "engine"):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode

    asyncio.run(run())
    assert environment.counts.closed == 1
    assert not engine.sessions
    environment.released.set()


@pytest.mark.parametrize("blocking", [True, False], ids=["blocks", "waits"])
def test_a_slow_step_holds_up_nothing_else(blocking):
    """The event loop goes on while a plain or an async step takes its time: the step ends once it has."""
    ticks = []

    def trouble(environment):
        return wait_until(lambda: len(ticks) > 10) if blocking else wait()

    async def wait():
        while len(ticks) <= 10:
            await asyncio.sleep(0.01)

    async def tick():
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def run():
        ticker = asyncio.create_task(tick())
        environment = Troubled(properties=THREADS, trouble=trouble)
        arguments = (environment, Plain(), north(), Renderer(tokenizer()), FAST, SamplingParams())
        got = await run_episode(TASK, *arguments)
        ticker.cancel()
        return got

    assert asyncio.run(run()).outcome is Outcome.SOLVED
    assert len(ticks) > 10


def test_threads_end_with_their_episodes():
    before = set(threading.enumerate())
    for properties in (THREADS, ONE_THREAD):
        for trouble in (raises, waits, blocks, is_slow):
            environment = Troubled(properties=properties, trouble=trouble)
            play(environment, limits=IMPATIENT)
            environment.released.set()
            assert environment.counts.started == environment.counts.closed == 1
    wait_until(lambda: set(threading.enumerate()) <= before)


def wait_until(is_so, limit_s=10.0):
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def test_few_shot_messages_of_the_task_may_hold_replies_without_ids():
    class Shown(Plain):
        async def act(self, history, policy):
            reply = await policy.generate([*history.task.messages, user(history.observation)])
            return Action(reply.text, (reply.generation,))

    shots = (user("Room 7."), Message(Role.ASSISTANT, "go north"))
    got = play(agent=Shown(), task=replace(TASK, messages=shots))
    assert got.outcome is Outcome.SOLVED
    assert "Room 7." in tokenizer().decode(got.generations[0].prompt.token_ids)


def test_the_parts_of_an_action_are_done_one_after_another_until_the_end():
    class Hurries(Plain):
        async def act(self, history, policy):
            action = await super().act(history, policy)
            return replace(
                action, text="go north\nlook\ngo north\ngo north", parts=("go north", "look", *["go north"] * 2)
            )

    environment = Corridor(length=2)
    got = play(environment, Hurries())
    assert got.outcome is Outcome.SOLVED and len(got.turns) == 1
    assert got.turns[0].reply.splitlines()[0] == "Room 1 of 0." and got.turns[0].reply.endswith("Room 2 of 0.")
    assert len(got.turns[0].reply.splitlines()) == 3, "the fourth comes after the end"
    assert got.turns[0].reward == 1.0 and got.turns[0].state_key == "room 0"
    # What was recorded is replayed part by part.
    halfway = replace(got.turns[0], action=replace(got.turns[0].action, parts=("go north", "look")))
    halfway = replace(halfway, reply="\n".join(got.turns[0].reply.splitlines()[:2]), reward=0.0)
    begun = TASK.started_after([halfway])
    again = play(Corridor(length=2), ChatAgent(system=""), task=begun)
    assert again.outcome is Outcome.SOLVED and again.n_given == 1 and len(again.turns) == 2


def test_an_agent_that_asks_without_end_is_stopped():
    class Asks(Plain):
        async def act(self, history, policy):
            while True:
                await policy.generate([user("Well?")])

    got = play(agent=Asks(), limits=replace(FAST, max_generations_per_turn=5))
    assert (
        got.outcome is Outcome.AGENT_ERROR
        and "limits.max_generations_per_turn" in got.detail
        and "turn 1" in got.detail
    )


def test_a_call_that_finds_no_room_counts_for_none():
    class Shortens(Plain):
        async def act(self, history, policy):
            for n in (500, 400, 300, 200):
                with pytest.raises(ContextFull):
                    await policy.generate([user("x" * n)])
            return await super().act(history, policy)

    got = play(Corridor(length=1), Shortens(), limits=replace(FAST, max_context=60, max_generations_per_turn=1))
    assert got.outcome is Outcome.SOLVED and len(got.generations) == 1


def test_an_agent_that_asks_for_what_has_no_room_without_end_is_stopped():
    class Insists(Plain):
        async def act(self, history, policy):
            while True:
                with suppress(ContextFull):
                    await policy.generate([user("x" * 500)])

    got = play(agent=Insists(), limits=replace(FAST, max_context=60, episode_timeout_s=0.5))
    assert got.outcome is Outcome.TIMEOUT
