"""Episode loop: environment, agent and engine in turn, until a typed end.

Whatever the parts do, `run_episode` returns a trajectory whose outcome says how it ended: an error of a part is a type
of its own and never looks like a low reward.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from agents.base import Agent, History
from agents.validation import checked_action
from environments.base import Capabilities, Environment, StepResult, properties_of
from rlhf.data import Action, Outcome, SamplingParams, Task, Trajectory, Turn
from rlhf.data.trajectory import SEAT
from rlhf.data.untrusted import described
from rlhf.errors import ContextFull, EngineError
from rlhf.inference.engine import RolloutEngine
from rlhf.rollout import telemetry
from rlhf.rollout.branching import Branch, SharedPrefix
from rlhf.rollout.env_session import EnvSession, EpisodeEnded, checked
from rlhf.rollout.executors import CallError, CallExecutor, InlineLane
from rlhf.rollout.limits import Limits
from rlhf.rollout.opponent_engine import OpponentEngine
from rlhf.rollout.policy_client import EpisodeMonitor, EpisodePolicy, EpisodeStatus
from rlhf.rollout.renderer import Renderer

#: Detail of an attempt that the environment terminated with `success=None`, which counts as unsolved.
UNDECIDED = "the environment did not say whether the task was solved"


def executor_for(environment: Environment) -> CallExecutor:
    """Executor of the environment's calls, by its declared properties; see `rlhf.rollout.executors`."""
    own = Capabilities(environment)
    return CallExecutor(
        inline=own.is_inline,
        shared=not properties_of(environment).thread_safe,
        limited=own.keeps_limits,
        name=f"environment {type(environment).__name__}",
        owner=environment,
    )


async def run_episode(
    task: Task,
    environment: Environment,
    agent: Agent,
    engine: RolloutEngine,
    renderer: Renderer,
    limits: Limits,
    sampling: SamplingParams,
    *,
    attempt: int = 0,
    branch: Branch | None = None,
    seed: int = 0,
    session: str = "episode",
    executor: CallExecutor | None = None,
    watch: EpisodeMonitor | None = None,
    opponents: Mapping[str, OpponentEngine] = MappingProxyType({}),
) -> Trajectory:
    """Attempt `task` once.

    The environment's episode is closed and the engine's session released on every path, also when this is cancelled.

    What the episode begins with, the task's prefix or the turns of a branch, is replayed in a fresh episode of the
    environment and stands in the trajectory as it was recorded. A replay that goes another way is an error of the
    environment. Turns of a task's prefix do not count for `limits.max_turns`. Those of a branch do.

    Args:
        task: given to the environment as it made it, and without its reference to the agent.
        environment: starts the episode; `start`, `step` and `close` may be plain or async functions.
        agent: chooses the actions.
        engine: samples for the agent.
        renderer: makes its prompts.
        limits: `max_tokens` of these is the limit of each generation.
        sampling: temperature and the like; its `max_tokens` and `seed` are replaced for each call.
        attempt: number within the group.
        branch: what it has in common with another attempt; None begins where the task does.
        seed: with attempt, turn and call it gives the seed of each generation.
        session: name of the engine's cache, unique among live episodes.
        executor: shared between the episodes of one environment; None makes one for this episode.
        watch: kept up to date while the episode runs.
        opponents: who has a seat in the policy's place, by its name, or a turn, by its key.
    """
    own = executor or executor_for(environment)
    clock, begun_at = time.monotonic(), time.time()
    watch = watch or EpisodeMonitor()
    policy = EpisodePolicy(engine, renderer, limits, sampling, seed, attempt, session, watch, opponents)
    begun = branch.turns if branch else task.prefix
    told = replace(task, messages=(*task.messages, *branch.messages)) if branch else task
    run = _Run(agent, limits, policy, watch, told, begun, branch.head if branch else None)
    live = EnvSession(environment, task.beginning, limits, own.open())
    notes: list[str] = []
    try:
        outcome, detail = await run.play(live)
    finally:
        watch.enter(EpisodeStatus.ENVIRONMENT)
        try:
            await live.close(notes)
        finally:
            for asked in {id(e): e for e in (engine, *(opponent.engine for opponent in opponents.values()))}.values():
                await _release(asked, session, limits, notes)
            if executor is None:
                await own.close()
    trajectory = Trajectory(
        task_id=task.id,
        attempt=attempt,
        opening=run.opening,
        turns=tuple(run.turns),
        outcome=outcome,
        detail="\n".join(filter(None, [detail, *notes])),
        duration_s=time.monotonic() - clock,
        n_given=min(len(task.prefix), len(run.turns)),
        parent=branch.parent if branch else None,
        n_shared=min(len(branch.turns), len(run.turns)) if branch else 0,
    )
    telemetry.tell(telemetry.EndedEpisode(trajectory, session, begun_at, run.prepared_s))
    return trajectory


class _Run:
    """The loop of turns."""

    def __init__(
        self,
        agent: Agent,
        limits: Limits,
        policy: EpisodePolicy,
        watch: EpisodeMonitor,
        task: Task,
        begun: Sequence[Turn],
        head: SharedPrefix | None,
    ) -> None:
        self._agent, self._limits, self._policy, self._watch = agent, limits, policy, watch
        self._task = replace(task, reference=None)
        self._begun, self._n_given, self._head = begun, len(task.prefix), head
        self._lane = InlineLane(f"agent {type(agent).__name__}", agent)
        self._shown: list[tuple[str, ...]] = []
        self._seats: list[str] = []
        self._clock = time.monotonic()
        self.prepared_s = 0.0
        self.opening = ""
        self.turns: list[Turn] = []

    async def play(self, live: EnvSession) -> tuple[Outcome, str]:
        """Outcome, and what to tell the reader about it."""
        limit = self._limits.episode_timeout_s
        try:
            async with asyncio.timeout(limit):
                return await self._play(live)
        except EpisodeEnded as ended:
            return ended.outcome, ended.detail
        except TimeoutError:
            return Outcome.TIMEOUT, f"the episode took longer than {limit:g} s; it waited for the {self._watch.phase}"

    async def _play(self, live: EnvSession) -> tuple[Outcome, str]:
        now = await live.start()
        self.opening = now.reply
        for turn in self._begun:
            now = await self._replay(live, turn, now)
        self.prepared_s = self._lap_s()
        while not (now.terminated or now.truncated):
            if len(self.turns) - self._n_given >= self._limits.max_turns:
                if now.success:
                    return Outcome.SOLVED, ""
                return Outcome.TURN_LIMIT, f"limits.max_turns is {self._limits.max_turns}"
            action = await self._act(now)
            now = await self._take(live, action, now)
        if now.success:
            return Outcome.SOLVED, ""
        if now.terminated:
            return Outcome.FAILED, UNDECIDED if now.success is None else ""
        return Outcome.TURN_LIMIT, "the environment's own step limit"

    async def _replay(self, live: EnvSession, turn: Turn, now: StepResult) -> StepResult:
        """Do what was done in `turn`. Raises EpisodeEnded unless the environment answers as it did then."""
        after = now
        try:
            if turn.action.error is None:
                after = await _do(live, turn.action)
            if problem := _another_way(turn, now, after):
                raise EpisodeEnded(
                    Outcome.ENV_ERROR, f"{problem}; is the environment deterministic? `rlhf check environment`"
                )
        except EpisodeEnded as ended:
            number, of = len(self.turns) + 1, len(self._begun)
            detail = f"replaying turn {number} of {of}, {turn.action.text[:80]!r}: {ended.detail}"
            raise EpisodeEnded(ended.outcome, detail) from ended
        self._add(turn, now)
        return after

    async def _act(self, now: StepResult) -> Action:
        seats = (*self._seats, now.seat)
        shown = tuple(self._shown)
        history = History(self._task, self.opening, tuple(self.turns), now.admissible_actions, shown, seats)
        head = self._head if len(self.turns) == len(self._begun) else None
        self._policy.begin_turn(len(self.turns), head, now.seat, self._n_given)
        self._watch.enter(EpisodeStatus.AGENT)
        try:
            action: Action = await self._lane.call(self._acted, history, timeout_s=None)
        except CallError as failed:
            error = failed.__cause__
            assert error is not None
            raise self._agent_ended(_engine_error(error) or error, str(failed), now) from error
        return replace(action, generations=self._policy.recorded(action.generations))

    async def _acted(self, history: History) -> Action:
        """Ask the agent. Raises AgentError where it answers what is no action."""
        action: Any = self._agent.act(history, self._policy)
        if inspect.isawaitable(action):
            action = await action
        return checked_action(action, self._policy.generations)

    def _agent_ended(self, error: BaseException, said: str, now: StepResult) -> EpisodeEnded:
        if isinstance(error, ContextFull):
            if self._policy.generations:  # the turn has begun: what was sampled for it is the policy's doing
                sampled = self._policy.recorded(self._policy.generations)
                action = Action("", sampled, error=error.what, notes={SEAT: now.seat} if now.seat else {})
                self._add(Turn(action, error.what, state_key=now.state_key, valid=False, duration_s=self._lap_s()), now)
            return EpisodeEnded(Outcome.TOKEN_LIMIT, f"{error.what}: {error.got}")
        if isinstance(error, EngineError):
            return EpisodeEnded(Outcome.ENGINE_ERROR, str(error))
        return EpisodeEnded(Outcome.AGENT_ERROR, f"act: {said}")

    async def _take(self, live: EnvSession, action: Action, now: StepResult) -> StepResult:
        if action.error is not None:
            turn = Turn(action, action.error, state_key=now.state_key, valid=False, duration_s=self._lap_s())
            self._add(turn, now)
            return now
        self._watch.enter(EpisodeStatus.ENVIRONMENT)
        try:
            after = await _do(live, action)
        except EpisodeEnded as ended:
            if ended.outcome is Outcome.TOKEN_LIMIT and action.generations:  # which were sampled before that
                self._add(Turn(action, ended.detail, state_key=now.state_key, duration_s=self._lap_s()), now)
            raise
        self._add(Turn(action, after.reply, after.reward, now.state_key, after.valid, self._lap_s()), now)
        return after

    def _lap_s(self) -> float:
        """Seconds since this was last asked."""
        before, self._clock = self._clock, time.monotonic()
        return self._clock - before

    def _add(self, turn: Turn, before: StepResult) -> None:
        self.turns.append(turn)
        self._shown.append(before.admissible_actions)
        self._seats.append(before.seat)


async def _do(live: EnvSession, action: Action) -> StepResult:
    """Do all parts of an action, until the environment ends the episode. Raises EpisodeEnded.

    Replies are joined, rewards added up, and a turn is valid where all of its parts are.
    """
    first, *others = action.steps
    now = await live.step(first)
    for part in others:
        if now.terminated or now.truncated:
            break
        after = await live.step(part)
        reply = f"{now.reply}\n{after.reply}"
        joined = replace(after, reply=reply, reward=now.reward + after.reward, valid=now.valid and after.valid)
        now = checked(joined, "step")
    return now


def _another_way(turn: Turn, before: StepResult, after: StepResult) -> str:
    """Say in what a replayed turn differs from the recorded one; empty if in nothing."""
    if before.state_key and turn.state_key and before.state_key != turn.state_key:
        return f"it began in state {before.state_key[:80]!r}, recorded is {turn.state_key[:80]!r}"
    if turn.action.error is None and after.reply != turn.reply:
        return f"the environment answered {after.reply[:200]!r}, recorded is {turn.reply[:200]!r}"
    if after.terminated or after.truncated:
        return "the environment ended the episode before the agent could act"
    return ""


async def _release(engine: RolloutEngine, session: str, limits: Limits, notes: list[str]) -> None:
    try:
        async with asyncio.timeout(limits.step_timeout_s):
            await engine.release(session)
    except Exception as error:  # the episode is over; the reader is told
        notes.append(f"engine.release: {described(error)}")


def _engine_error(error: BaseException | None) -> EngineError | None:
    """Engine error behind an agent's exception: a group of parallel calls, or an error of its own."""
    if error is None or isinstance(error, EngineError):
        return error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else (error.__cause__,)
    return next((found for e in inner if (found := _engine_error(e))), None)
