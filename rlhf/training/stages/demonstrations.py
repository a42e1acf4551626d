"""Demonstrations: trajectories of an environment's oracle, with noise if asked for, and their tokens.

Playing and rendering are apart, because a tokenizer trained from scratch is trained on the text of the same
demonstrations that it later encodes.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from agents.base import History, Reply
from agents.memory.base import MEMORY, DemonstrationInputs
from environments.base import Environment, Oracle, StepResult, can_demonstrate
from rlhf.data import Action, Finish, Generation, Message, Outcome, Role, Task, Trajectory, Turn
from rlhf.data.generation import DEMONSTRATED
from rlhf.data.report import one_line
from rlhf.errors import AgentError, EnvError, RecipeError, whole
from rlhf.inference.seeds import stable_seed
from rlhf.rollout.env_session import EnvSession, EpisodeEnded
from rlhf.rollout.episode import executor_for
from rlhf.rollout.executors import CallError, CallTimeout, Lane
from rlhf.rollout.group import RETRYABLE
from rlhf.rollout.limits import Limits
from rlhf.rollout.renderer import Renderer

#: Calls of one demonstrated turn.
_MAX_CALLS = 100
#: Tasks after which a share of failures begins to mean something.
FEW = 50


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A played trajectory without tokens.

    Attributes:
        task: what was played.
        trajectory: without generations.
        admissible: of each turn, the actions that were possible.
        recalls: of each turn, what was worth remembering before it; empty where no agent needs it, or the environment
            cannot say it.
        subgoals: of each turn, what it was for; likewise.
        seats: of each turn, who had it; likewise, where there is one player.
    """

    task: Task
    trajectory: Trajectory
    admissible: tuple[tuple[str, ...], ...]
    recalls: tuple[str, ...] = ()
    subgoals: tuple[str, ...] = ()
    seats: tuple[str, ...] = ()

    @property
    def texts(self) -> Iterator[str]:
        """Everything that was said, for training a tokenizer."""
        yield self.trajectory.opening
        for turn in self.trajectory.turns:
            yield turn.action.text
            yield turn.reply
        yield from self.recalls
        yield from self.subgoals

    def shown(self, turn: int) -> DemonstrationInputs:
        """Demonstrated content of a turn."""
        before, subgoal = (("", *self.subgoals)[turn : turn + 2]) if self.subgoals else ("", "")
        recalled, recall = (("", *self.recalls)[turn : turn + 2]) if self.recalls else ("", "")
        return DemonstrationInputs(self.trajectory.turns[turn].action.text, recall, subgoal, before, recalled=recalled)


async def play(
    environment: Environment,
    tasks: Sequence[Task],
    *,
    random_share: float,
    unsolved_share: float,
    limits: Limits,
    seed: int,
    needs: Collection[str] = (),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Demonstration]:
    """Oracle demonstrations of each task, with occasional random actions, and some tasks wholly random.

    Half of the random actions are possible where they are taken, the other half were possible somewhere else: what the
    environment answers to a mistake is then in the demonstrations too.

    What an agent `needs` beside actions, `recall` and `subgoal`, the environment is asked for before each of them.

    An attempt in which the environment fails is made afresh, as in a rollout; where that does not help, the task is
    left out and `say` is told. So is a task for which the oracle has no plan: it could only be played at random.

    Raises:
        RecipeError: the environment has no oracle.
        EnvError: more than `limits.max_error_fraction` of the tasks could not be played.
    """
    if not can_demonstrate(environment) and (random_share < 1 and unsolved_share < 1):
        raise RecipeError(
            "this environment cannot demonstrate",
            where="stages: supervised",
            got=type(environment).__name__,
            expected="an environment with a method `plan(task, taken)`",
            hint="remove the supervised stage, or start from a pretrained policy",
        )
    played: list[Demonstration] = []
    failures: list[str] = []
    unplanned: list[str] = []
    pool: dict[str, None] = {}
    executor = executor_for(environment)
    try:
        for i, task in enumerate(tasks):
            for retry in range(1 + limits.max_retries):
                rng = random.Random(stable_seed(seed, "demonstration", i, task.id))
                share = 1.0 if rng.random() < unsolved_share else random_share
                deviations = RandomDeviations(share, dict(pool), rng)
                try:
                    played.append(await play_one(environment, task, deviations, limits, executor.open(), needs, True))
                    pool = deviations.pool
                    break
                except _Unplanned:
                    unplanned.append(task.id)
                    break
                except EpisodeEnded as ended:
                    if ended.outcome not in RETRYABLE or retry == limits.max_retries:
                        failures.append(f"{ended.outcome.value} in {task.id}: {one_line(ended.detail)}")
                        _check_failures(failures, i + 1, len(tasks), limits)
                        break
            on_progress(i + 1, len(tasks))
            await asyncio.sleep(0)  # where Ctrl-C is heard
    finally:
        await executor.close()
    if failures:
        say(
            f"caution: {len(failures)} of {len(tasks)} demonstrations failed and are left out; the first: {failures[0]}"
        )
    if unplanned:
        say(f"the oracle has no plan for {len(unplanned)} of {len(tasks)} tasks, left out: {unplanned[0]}, ...")
    return played


class _Unplanned(Exception):
    """The oracle has no plan for a task."""


def _check_failures(failures: Sequence[str], n_tried: int, n_tasks: int, limits: Limits) -> None:
    """Raise EnvError where too many plays failed, checked early and at the end."""
    if len(failures) > limits.max_error_fraction * max(n_tried, min(n_tasks, FEW)):
        raise EnvError(
            "too many demonstrations failed",
            where=f"{n_tried} of {n_tasks} demonstrations",
            got=f"{len(failures)} failures, the first: {failures[0]}",
            expected=f"at most {limits.max_error_fraction:.0%} (limits.max_error_fraction)",
            hint="run `rlhf check environment`",
        )


class Deviations(Protocol):
    """Departures of demonstrations from the plan of the oracle."""

    def is_next(self, state: StepResult) -> bool:
        """True if the next action is not the oracle's; asked once before each."""

    def action(self, state: StepResult) -> str:
        """Action in place of the oracle's, also where the oracle has none."""


@dataclass(frozen=True, slots=True)
class RandomDeviations:
    """Replaces a share of the oracle's actions by random ones.

    Attributes:
        share: probability that an action is random.
        pool: every action that was admissible so far, in the order of discovery.
    """

    share: float
    pool: dict[str, None]
    rng: random.Random

    def is_next(self, state: StepResult) -> bool:
        """True if the next action is random; adds the admissible ones to the pool."""
        self.pool.update(dict.fromkeys(state.admissible_actions))
        return self.rng.random() < self.share

    def action(self, state: StepResult) -> str:
        """A random action, from the admissible ones or from the pool."""
        anywhere = self.rng.random() < 0.5
        return self.rng.choice(list(self.pool) if anywhere and self.pool else state.admissible_actions or ("",))


async def play_one(
    environment: Environment,
    task: Task,
    deviations: Deviations,
    limits: Limits,
    lane: Lane,
    needs: Collection[str],
    must_plan: bool = False,
) -> Demonstration:
    """Oracle demonstration of one task, deviating where `deviations` says so; `needs` as in `play`.

    Without a plan of the oracle `deviations` plays all of it, unless it `must_plan`.

    Raises:
        EpisodeEnded: the environment fails or takes too long.
        _Unplanned: the oracle must have a plan, and has none.
    """
    live = EnvSession(environment, task, limits, lane)
    try:
        async with asyncio.timeout(limits.episode_timeout_s):
            played, shown, seats = await _steps(environment, task, live, deviations, limits, lane, must_plan)
            taken = [turn.action.text for turn in played.turns]
            recalls, subgoals = [
                await _said(environment, name, task, taken, limits, lane) if name in needs else ()
                for name in ("recall", "subgoal")
            ]
            return Demonstration(task, played, shown, recalls, subgoals, seats if any(seats) else ())
    except TimeoutError:
        raise EpisodeEnded(Outcome.TIMEOUT, f"longer than {limits.episode_timeout_s:g} s") from None
    finally:
        await live.close([])


async def _steps(
    environment: Environment,
    task: Task,
    live: EnvSession,
    deviations: Deviations,
    limits: Limits,
    lane: Lane,
    must_plan: bool,
) -> tuple[Trajectory, tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Trajectory, possible actions before each turn, and the seat of each. Raises EpisodeEnded or _Unplanned."""
    opening = state = await live.start()
    turns: list[Turn] = []
    shown: list[tuple[str, ...]] = []
    seats: list[str] = []
    plan: list[str] | None = None
    outcome = Outcome.TURN_LIMIT
    while len(turns) < limits.max_turns:
        deviates = deviations.is_next(state)
        if plan is None and not deviates:
            plan = await plan_of(environment, task, [t.action.text for t in turns], limits, lane)
            if must_plan and not plan and not turns:
                raise _Unplanned
        if deviates or not plan:
            # An oracle that knows no way on leaves the rest to chance: an unsolved demonstration.
            text, plan = deviations.action(state), None if deviates else []
        else:
            text = plan.pop(0)
        result = await live.step(text)
        shown.append(state.admissible_actions)
        seats.append(state.seat)
        turns.append(Turn(Action(text), result.reply, result.reward, state.state_key, result.valid))
        state = result
        if state.terminated or state.truncated:
            outcome = Outcome.SOLVED if state.success else Outcome.FAILED
            break
    return Trajectory(task.id, 0, opening.reply, tuple(turns), outcome), tuple(shown), tuple(seats)


async def _said(
    environment: Environment, name: str, task: Task, taken: Sequence[str], limits: Limits, lane: Lane
) -> tuple[str, ...]:
    """Environment's explanation before each action, where it has such a method. Raises EpisodeEnded."""
    if not callable(getattr(environment, name, None)):  # what stands for another environment passes its methods on
        return ()
    said: list[str] = []
    for k in range(len(taken)):
        try:
            text = await lane.call(getattr(environment, name), task, list(taken[:k]), timeout_s=limits.start_timeout_s)
        except CallTimeout as error:
            raise EpisodeEnded(Outcome.TIMEOUT, f"{name}: {error}") from error
        except (CallError, EnvError) as error:
            raise EpisodeEnded(Outcome.ENV_ERROR, f"{name}: {error}") from error
        if not isinstance(text, str):
            raise EpisodeEnded(Outcome.ENV_ERROR, f"{name}: got {type(text).__name__}, expected text")
        said.append(text)
    return tuple(said)


async def plan_of(environment: Environment, task: Task, taken: list[str], limits: Limits, lane: Lane) -> list[str]:
    """Oracle's plan after `taken`; empty where it has none. Raises EpisodeEnded."""
    try:
        found = await lane.call(cast(Oracle, environment).plan, task, taken, timeout_s=limits.start_timeout_s)
    except CallTimeout as error:
        raise EpisodeEnded(Outcome.TIMEOUT, f"plan: {error}") from error
    except (CallError, EnvError) as error:
        raise EpisodeEnded(Outcome.ENV_ERROR, f"plan: {error}") from error
    if found is not None and (not isinstance(found, list | tuple) or not all(isinstance(a, str) for a in found)):
        raise EpisodeEnded(Outcome.ENV_ERROR, f"plan: got {type(found).__name__}, expected a list of texts or None")
    return list(found or ())


@runtime_checkable
class NeedsDemonstrationInputs(Protocol):
    """An agent whose demonstrations need more than actions."""

    @property
    def needs(self) -> Collection[str]:
        """Needs besides actions: `recall`, `subgoal`, both or none."""


@runtime_checkable
class WritesDemonstrations(Protocol):
    """An agent that can write demonstrations."""

    def write(self, shown: DemonstrationInputs) -> str:
        """Return what the agent would have said; the inverse of its parser."""


def needs_of(agent: object) -> Collection[str]:
    """Needs of an agent's demonstrations beside actions: `recall`, `subgoal`, both or nothing."""
    return tuple(agent.needs) if isinstance(agent, NeedsDemonstrationInputs) else ()


async def render(demonstrations: Iterable[Demonstration], agent: Any, renderer: Renderer) -> list[Trajectory]:
    """Give each demonstrated action the prompts and the tokens with which `agent` would have said it.

    The agent itself acts; to each of its calls answers what `agent.write(shown)` says, the inverse of its parser (see
    `agents.memory.base.DemonstrationInputs`). Summaries and subgoals that it asks for are so demonstrated too.

    Raises:
        RecipeError: the agent has no `write`.
        AgentError: it fails, or asks without end.
    """
    if not isinstance(agent, WritesDemonstrations):
        raise RecipeError(
            "this agent cannot be shown demonstrations",
            where="agent",
            got=type(agent).__name__,
            expected="a method `write` beside `act`, as agents.chat.ChatAgent has",
            hint="add the method, or remove the supervised stage",
        )
    return [await _render_one(d, agent, renderer) for d in demonstrations]


@dataclass
class _Demonstrator:
    """A policy that says what a demonstration shows.

    Attributes:
        agent: whose `write` puts it into words.
        renderer: of prompts and replies.
        shown: of this turn.
        n_calls: in this turn.
        n_words: of those, how many asked for something else than what is to be remembered.
    """

    agent: Any
    renderer: Renderer
    shown: DemonstrationInputs
    n_calls: int = 0
    n_words: int = 0

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        role: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        """Say what is shown; see `agents.base.PolicyHandle`."""
        self.n_calls += 1
        if self.n_calls > _MAX_CALLS:
            raise AgentError(
                "the agent keeps calling the policy without acting", where="agent", got=f"{self.n_calls} calls"
            )
        asked = messages[-1].content if messages else ""
        shown = replace(self.shown, role=role, n_calls=self.n_words, asked=asked)
        ids = self.renderer.encode_reply(self.agent.write(shown))
        self.n_words += role != MEMORY
        prompt = self.renderer.prompt(messages, tools, role)
        generation = Generation(prompt, ids, (0.0,) * len(ids), Finish.STOP, policy_version=DEMONSTRATED, role=role)
        return Reply(self.renderer.reply_text(ids), generation)

    def n_tokens(self, messages: Sequence[Message]) -> int:
        """Length of the prompt that `messages` make."""
        return len(self.renderer.prompt(messages).token_ids)


async def _render_one(demonstration: Demonstration, agent: Any, renderer: Renderer) -> Trajectory:
    task, played = replace(demonstration.task, reference=None), demonstration.trajectory
    turns: list[Turn] = []
    for k, turn in enumerate(played.turns):
        admissible, seats = demonstration.admissible, demonstration.seats[: k + 1]
        history = History(task, played.opening, tuple(turns), admissible[k], admissible[:k], seats)
        action = await agent.act(history, _Demonstrator(agent, renderer, demonstration.shown(k)))
        # What was done was done, also where the agent reads its own words otherwise.
        turns.append(replace(turn, action=replace(action, text=turn.action.text, error=None)))
    return replace(played, turns=tuple(turns))


def save(path: Path, found: Sequence[Demonstration]) -> None:
    """Write demonstrations as JSON lines, whole or not at all."""
    with whole("demonstrations", path) as partial:
        partial.write_text("".join(json.dumps(asdict(d)) + "\n" for d in found))


def load(path: Path) -> list[Demonstration]:
    """Read what `save` wrote."""
    return [_from_plain(json.loads(line)) for line in path.read_text().splitlines()]


def _from_plain(plain: dict[str, Any]) -> Demonstration:
    task, played = plain["task"], plain["trajectory"]
    task["prefix"] = ()  # a demonstration begins where the task does
    task["messages"] = tuple(Message(Role(m["role"]), m["content"]) for m in task["messages"])
    turns = tuple(Turn(**{**turn, "action": Action(turn["action"]["text"])}) for turn in played["turns"])
    trajectory = Trajectory(**{**played, "turns": turns, "outcome": Outcome(played["outcome"])})
    admissible = tuple(tuple(names) for names in plain["admissible"])
    recalls, subgoals, seats = (tuple(plain.get(name, ())) for name in ("recalls", "subgoals", "seats"))
    return Demonstration(Task(**task), trajectory, admissible, recalls, subgoals, seats)
