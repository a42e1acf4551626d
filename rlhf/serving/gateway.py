"""The gateway beside any training: a policy for outside agents, whose attempts are scored and kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from environments.base import max_concurrent_episodes
from rlhf.build.engine import make_publisher
from rlhf.build.processes import stopped_by_term
from rlhf.build.train import device, make_runner, policy_of
from rlhf.chat_api import RetryPolicy
from rlhf.data import ScoredGroup, Task
from rlhf.evaluation.baselines import MessageIdRenderer
from rlhf.evaluation.endpoint import EndpointEngine
from rlhf.evaluation.store import TrajectoryWriter, list_steps
from rlhf.gateway.agent import external_agent
from rlhf.gateway.environment import External
from rlhf.gateway.programs import KEY, programs_of
from rlhf.gateway.recording import chats_of
from rlhf.gateway.request import Refusal
from rlhf.gateway.server import Gateway
from rlhf.gateway.session import SESSION, Session
from rlhf.progress import RichProgress
from rlhf.recipe import Recipe
from rlhf.rollout.episode import run_episode
from rlhf.rollout.runner import RolloutRunner
from rlhf.rollout.scoring import score_group
from rlhf.rollout.tasks import tasks_of
from rlhf.terminal import CleanConsole
from rlhf.training.stages.policy_gradient import PolicyGradient

#: The stage under which attempts are kept.
STAGE = "gateway"


def serve(
    recipe: Recipe,
    *,
    checkpoint: Path | None,
    out: Path,
    split: str,
    reward: Literal["client", "environment", "recipe"] | None,
    host: str,
    port: int,
    console: CleanConsole,
    endpoint: str = "",
    model: str = "",
    most: int | None = None,
) -> dict[str, Any]:
    """Serve sessions until stopped; returns how attempts ended.

    Args:
        recipe: its environment is the world, its agent counts where it is an external one.
        checkpoint: of the policy.
        out: folder of the attempts.
        split: tasks that are given to who names none.
        reward: who says what an attempt earned, in the place of `environment.reward`; None for that.
        host: to listen on.
        port: 0 takes a free one.
        console: for progress.
        endpoint: an OpenAI-compatible server whose model is asked in the place of the policy; empty for the policy.
        model: its name there.
        most: attempts, after which it stops; None for any number.

    Raises:
        RlhfError: the policy cannot be loaded, or the port is in use.
    """
    given: Any = recipe.environment
    found = given if isinstance(given, External) else External(environment=given)
    found = found if reward is None else replace(found, reward=reward)
    environment: Any = replace(found, command=(), n_programs=None, host=host, port=port)
    tool_definitions: Any = "chat_template" if endpoint else "system_prompt"
    slow = max(recipe.limits.step_timeout_s, External.limits_defaults["step_timeout_s"])
    recipe = replace(
        recipe,
        environment=environment,
        agent=external_agent(recipe.agent, tool_definitions),
        limits=replace(recipe.limits, step_timeout_s=slow),
    )
    behind = _endpoint(recipe, endpoint, model) if endpoint else _policy(recipe, checkpoint)
    return asyncio.run(_serve(recipe, behind, out, split, most, console))


#: What answers: made when there is a loop, and told where to say what it does.
Behind = Callable[[RichProgress], Awaitable[RolloutRunner]]


def _endpoint(recipe: Recipe, url: str, model: str) -> Behind:
    async def begin(progress: RichProgress) -> RolloutRunner:
        agent: Any = recipe.agent
        renderer = MessageIdRenderer()
        patience = RetryPolicy.within(recipe.limits.episode_timeout_s)
        engine: Any = EndpointEngine(url, model, renderer, patience=patience, style=agent.tool_format)
        return RolloutRunner(
            environment=recipe.environment,
            agent=agent,
            rewards=recipe.rewards,
            engine=engine,
            renderer=renderer,
            limits=recipe.limits,
            seed=recipe.seed,
        )

    return begin


def _policy(recipe: Recipe, checkpoint: Path | None) -> Behind:
    policy = policy_of(recipe, checkpoint)
    policy.model.to(device())

    async def begin(progress: RichProgress) -> RolloutRunner:
        runner = await make_runner(recipe, policy, progress)
        await make_publisher(recipe, policy, runner.engine).publish()
        return runner

    return begin


def temperature_of(recipe: Recipe) -> float:
    """Temperature of the recipe's last policy-gradient stage, else of its evaluations."""
    own = [stage.temperature for stage in recipe.stages if isinstance(stage, PolicyGradient)]
    return own[-1] if own else recipe.evaluation.temperature


async def _serve(
    recipe: Recipe, behind: Behind, out: Path, split: str, most: int | None, console: CleanConsole
) -> dict[str, Any]:
    with RichProgress(console) as progress, stopped_by_term():
        async with contextlib.AsyncExitStack() as stack:
            runner = await behind(progress)
            stack.push_async_callback(runner.engine.close)
            serving = Serving(runner, tasks_of(recipe.environment, split), out, temperature_of(recipe), most)
            stack.push_async_callback(serving.close)
            with contextlib.suppress(asyncio.CancelledError):
                gateway = await serving.start()
                progress.say(f"gateway at {gateway.url}; {KEY}={gateway.key}; attempts go to {out}; Ctrl-C stops it")
                await serving.ended.wait()
                if serving.error is not None:
                    raise serving.error
    return {"attempts": dict(serving.outcomes), "out": str(out)}


class Serving:
    """Sessions that clients open by themselves.

    Args:
        runner: policy, rewards and limits of the attempts.
        tasks: given out in turn to who names none.
        out: folder of the attempts; those that are solved are in its `chats.jsonl` too, for a supervised stage.
        temperature: that replies are sampled at.
        most: attempts in all; None for any number.

    Attributes:
        outcomes: of the attempts that are over.
        ended: set when there were `most`, or one could not be kept.
        error: why it could not.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        tasks: Sequence[Task],
        out: Path,
        temperature: float,
        most: int | None = None,
    ) -> None:
        self._runner, self._tasks, self._most = runner, list(tasks), most
        self._sampling = runner.limits.sampling(temperature)
        self._chats = out / "chats.jsonl"
        self.ended = asyncio.Event()
        self.error: BaseException | None = None
        self._by_id = {task.id: task for task in self._tasks}
        most_at_once = runner.limits.max_concurrent
        self._room = min(most_at_once, max_concurrent_episodes(runner.environment) or most_at_once)
        self._writer = TrajectoryWriter(out / "trajectories")
        self._running: set[asyncio.Task[ScoredGroup]] = set()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._opening = asyncio.Lock()
        self._n = 0
        self._first = max((found.step for found in list_steps(out / "trajectories")), default=0)
        self._programs = programs_of(runner.environment)  # type: ignore[arg-type]
        self.outcomes: Counter[str] = Counter()

    async def start(self) -> Gateway:
        """Listen."""
        environment: Any = self._runner.environment
        key = os.environ.get(KEY, "")
        gateway = Gateway(environment.host, environment.port, key=key, opens=self._opens)
        await asyncio.to_thread(gateway.start)
        self._programs.gateway = gateway
        return gateway

    async def close(self) -> None:
        """End what runs."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._runner.environment.close()  # type: ignore[attr-defined]

    async def _opens(self, wanted: Any, attempt: int) -> Session:
        """Open a session; called on the server's thread."""
        future = asyncio.run_coroutine_threadsafe(self._open(wanted, attempt), self._loop)
        return await asyncio.wrap_future(future)

    async def _open(self, wanted: Any, attempt: int) -> Session:
        async with self._opening:
            if self._most is not None and self._n >= self._most:
                raise Refusal(410, f"there are no more than {self._most} attempts. Do: stop.", "no_more")
            if len(self._running) >= self._room:
                raise Refusal(429, f"{len(self._running)} sessions are open. Do: ask again.", "busy", after_s=1.0)
            task = self._task(wanted)
            self._n, number = self._n + 1, self._first + self._n + 1
            running = asyncio.create_task(self._attempt(task, attempt, number))
            self._running.add(running)
            running.add_done_callback(self._over)
            gateway = self._programs.gateway
            assert gateway is not None
            while not gateway.waiting:
                if running.done():
                    raise Refusal(500, f"the attempt ended before it began: {self._end_of(running)}.", "failed")
                await asyncio.sleep(0.001)
            session: Session = gateway.waiting.popleft()
            return session

    def _over(self, running: asyncio.Task[ScoredGroup]) -> None:
        self._running.discard(running)
        if not running.cancelled() and (error := running.exception()) is not None:
            self.error = error
            self.ended.set()

    def _task(self, wanted: Any) -> Task:
        """The task that is named, or given whole, or the next. Raises Refusal."""
        if wanted is None:
            return self._tasks[(self._first + self._n) % len(self._tasks)]
        if isinstance(wanted, str) and wanted in self._by_id:
            return self._by_id[wanted]
        raise Refusal(
            404, f"no task is called {str(wanted)[:80]!r}. Expected: such as {self._tasks[0].id!r}.", "no_task"
        )

    @staticmethod
    def _end_of(running: asyncio.Task[ScoredGroup]) -> str:
        if running.cancelled():
            return "cancelled"
        if (error := running.exception()) is not None:
            return str(error)
        group = running.result()
        return "; ".join(f"{f.outcome.value}: {f.message}" for f in group.failures) or group.trajectories[0].detail

    async def _attempt(self, task: Task, attempt: int, number: int) -> ScoredGroup:
        found: Any = self._runner
        limits = found.limits
        parts = (found.environment, found.agent, found.engine, found.renderer, limits, self._sampling)
        played = await run_episode(task, *parts, attempt=attempt, seed=found.seed + number, session=f"gateway/{number}")
        group = await score_group(task, [played], found.rewards, timeout_s=limits.reward_timeout_s)
        await asyncio.to_thread(self._keep, number, task, group)
        self.outcomes[(group.failures[0].outcome if group.failures else group.trajectories[0].outcome).value] += 1
        if self.outcomes.total() == self._most:
            self.ended.set()
        return group

    def _keep(self, number: int, task: Task, group: ScoredGroup) -> None:
        """Write an attempt, and its chats where it is solved; one thread at a time."""
        with self._lock:
            self._writer.write_groups(STAGE, number, "eval", [group])
        session, found = SESSION.get(None), self._runner
        if session is None or session.conversations is None or not any(t.solved for t in group.trajectories):
            return
        agent: Any = found.agent
        rows = chats_of(session.conversations, agent, found.renderer.reply_text)
        with self._lock, self._chats.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"task": task.id, **row}) + "\n" for row in rows)
