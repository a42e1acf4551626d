"""Attempts by an outside program, which calls the policy through the gateway and reports the reward.

    environment:
      kind: external
      command: [/path/to/venv/bin/python, agent.py]
      environment: {kind: dataset, path: questions.jsonl}
    agent: {kind: external}

Each attempt has an address and a key of its own. A turn is what the policy said between two waits for the program, so
that credit, losses, limits and reports work as with an agent of this process.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from environments.base import (
    AgentFailed,
    Capabilities,
    Environment,
    OutOfContext,
    Properties,
    RewardMissing,
    StepResult,
    after_end,
    max_concurrent_episodes,
    properties_of,
)
from environments.core.picked_tasks import listed
from rlhf.checking import CheckContext, IgnoredKeys, Problem
from rlhf.data import Finish, Outcome, Task
from rlhf.errors import EnvError
from rlhf.gateway.program import Program, is_there
from rlhf.gateway.programs import Programs, programs_of
from rlhf.gateway.request import CONTEXT_FULL, ChatReply, ChatRequest
from rlhf.gateway.session import SESSION, Session
from rlhf.rollout.env_session import EnvSession, EpisodeEnded
from rlhf.rollout.episode import executor_for
from rlhf.rollout.limits import Limits
from rlhf.settings import STRICT

#: Seconds without a request of a program after which a warning says what is waited for.
QUIET_S = 15.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class External:
    """Attempts made by a program outside of this process, with the policy behind an OpenAI-compatible address."""

    #: Nothing demonstrates what a program of others asks.
    demonstrates: ClassVar[bool] = False

    ignored_keys: ClassVar[tuple[IgnoredKeys, ...]] = (IgnoredKeys("n_programs", None, ("max_concurrent",)),)
    offers_tools: ClassVar[bool] = True
    inline: ClassVar[bool] = True  # a step waits on the event loop for the program, and computes nothing there
    limits_defaults: ClassVar[Mapping[str, Any]] = {"step_timeout_s": 120.0}

    environment: Environment
    """Source of the tasks: `{kind: dataset, path: tasks.jsonl}`, or any environment."""
    command: tuple[str, ...] = ()
    """The agent's program and its arguments; empty waits for agents that come by themselves and ask for attempts."""
    n_programs: Annotated[int, Field(ge=1)] | None = None
    """So many programs that ask for one attempt after the other; null starts one program for each attempt."""
    max_concurrent: Annotated[int, Field(ge=1)] = 1
    """Attempts that one of these programs makes at a time."""
    folder: Path | None = None
    """Folder that the program is run in; null is the present one."""
    variables: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables of the program, beside those that tell it of the gateway."""
    reward: Literal["client", "environment", "recipe"] = "client"
    """Source of the reward: the program; the environment, played through the gateway; or the recipe's rewards."""
    success_threshold: float = 1.0
    """A reward of the client of at least so much is a success, where the program does not say."""
    reward_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    """Most seconds for which a reward may come after the end of an attempt."""
    memory_mb: Annotated[int, Field(ge=64)] | None = None
    """Address space of the program."""
    cpu_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Processor time of the program."""
    host: str = "127.0.0.1"
    """Address that the gateway listens on; another address lets other machines in."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Its port; 0 takes a free one."""

    @model_validator(mode="after")
    def _agrees(self) -> External:
        if self.n_programs is not None and not self.command:
            raise ValueError("n_programs starts programs, and there is no command")
        return self

    def __hash__(self) -> int:
        """Settings are hashed by their text, as `variables` cannot be."""
        return hash(repr(self))

    @property
    def max_episodes(self) -> int | None:
        """As many as there are programs and copies of the environment for: none waits for one while its clock runs."""
        own = None if self.n_programs is None else self.n_programs * self.max_concurrent
        of_env = max_concurrent_episodes(self.environment) if self.reward == "environment" else None
        return min((n for n in (own, of_env) if n is not None), default=None)

    @property
    def environment_limits(self) -> Limits:
        """Limits of the environment's calls: what it suggests, and a step as long as one of the program at least."""
        suggested = Capabilities(self.environment).limits_defaults
        usual = float(self.limits_defaults["step_timeout_s"])
        return Limits(step_timeout_s=max(usual, float(suggested.get("step_timeout_s", 0.0))))

    @property
    def properties(self) -> Properties:
        """Declared properties: no more than is known of a stranger's program."""
        found = properties_of(self.environment)
        return Properties(
            splits=found.splits,
            package=found.package,
            repeats=found.repeats,
            judged_by_rewards=self.reward == "recipe",
        )

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse agents of this process, as the program asks the policy itself, and one port for many processes."""
        recipe = context.recipe
        kind = context.kind_of("agent", recipe.agent)
        if recipe.environment is self and kind != "external":
            yield Problem(
                "the agent of this environment is an external program",
                where="agent.kind",
                got=kind,
                expected="external",
                do="write agent: {kind: external}",
            )
        if self.command and not is_there(self.command[0], self.folder):
            yield Problem(
                "there is no such program",
                where=context.at("command"),
                got=self.command[0],
                expected="a program, found by PATH or by its path",
                do="name its interpreter: command: [/path/to/venv/bin/python, agent.py]",
            )
        if recipe.cluster.is_on and self.port:
            yield Problem(
                "rollout workers of one machine would all listen on the same port",
                where=context.at("port"),
                got=f"{self.port}, with cluster.rollout_workers: {recipe.cluster.rollout_workers}",
                expected="0, a free port for each",
                do="remove the key",
            )

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of the environment."""
        return listed(self.environment.tasks(split))

    def fingerprint(self) -> str:
        """Digest of the data that the environment reads."""
        own = Capabilities(self.environment).fingerprint
        return own() if own else ""

    async def start(self, task: Task) -> ExternalEpisode:
        """Begin one attempt: wait for the first request of its program. Raises EnvError."""
        episode = ExternalEpisode(self, task, programs_of(self))
        SESSION.set(episode.session)
        try:
            await episode.begin()
        except BaseException:
            await episode.close()
            raise
        return episode

    def close(self) -> None:
        """End the programs and the gateway that its episodes share."""
        programs_of(self).close()


class ExternalEpisode:
    """One attempt of a program."""

    def __init__(self, settings: External, task: Task, programs: Programs) -> None:
        self._settings, self._task, self._programs = settings, task, programs
        self._env: EnvSession | None = None
        self._executor = executor_for(settings.environment)
        self._now = StepResult("")
        self._earned, self._is_valid, self._is_over = 0.0, True, False
        self._program: Program | None = None
        self._env_error: AgentFailed | EnvError | None = None
        self.session = Session(payload(task, with_reference=settings.reward == "client"))
        self.opening = StepResult("")

    async def begin(self) -> None:
        """Start the program, or offer the attempt, and wait for its first request."""
        settings, session = self._settings, self.session
        if settings.reward == "environment":
            self._env = EnvSession(settings.environment, self._task, settings.environment_limits, self._executor.open())
            self._now = await self._from_env(self._env.start())
            session.task = {**session.task, "opening": self._now.reply}
            session.step = self._step_environment
        gateway = await self._programs.begin(session)
        if settings.command and settings.n_programs is None:
            self._program = Program(
                settings.command,
                dict(settings.variables) | variables_of(gateway.url_of(session), session),
                memory_mb=settings.memory_mb,
                cpu_s=settings.cpu_s,
                folder=settings.folder,
                on_end=session.leave,
            )
            await self._program.start(json.dumps(session.task).encode())
        self.opening = await self._next()

    async def step(self, action: str) -> StepResult:
        """Wait for what the program does with the replies; `action` is the last of them."""
        if self._is_over:
            raise after_end(self._task.id, action)
        # Where another than the policy plays, such as at random, nobody has answered yet. What the policy left waits.
        if not self.session.was_played:
            self.session.answer_with(action, _unsampled)
        self.session.was_played = False
        return await self._next()

    async def close(self) -> None:
        """End the session and the program."""
        self.session.close()
        self._programs.end(self.session)
        if self._program is not None:
            await self._program.close()
        if self._env is not None:
            await self._env.close([])
        await self._executor.close()

    async def _next(self) -> StepResult:
        session = self.session
        telling = asyncio.get_running_loop().call_later(QUIET_S, self._tell_of_quiet)
        try:
            while not (session.is_asking or session.has_ended):
                await session.changed()
        finally:
            telling.cancel()
        if session.is_asking and not (session.is_finished or session.failure):
            now = self._now  # which may be the end of the environment's episode: agents then ask for a last word
            won = (now.terminated or now.truncated) and bool(now.success)
            return self._since(StepResult(session.said, state_key=now.state_key, success=won or None))
        self._is_over = True
        self._refuse_unjudged()
        return await self._end()

    def _tell_of_quiet(self) -> None:
        """Warn of an attempt that waits for its program, once for the first request and once for a later one."""
        gateway, program = self._programs.gateway, self._program or self._programs.program_of(self.session)
        limit = "limits.start_timeout_s" if not self.session.counts["n_requests"] else "limits.step_timeout_s"
        if limit in self._programs.told:
            return
        self._programs.told.add(limit)
        if gateway is not None and self.session in tuple(gateway.waiting):
            waits = f"no agent has asked the gateway for an attempt. Expected: POST {gateway.url}/sessions"
        else:
            wrote = f" Its last output: {program.said[-200:] or 'nothing'}." if program else ""
            waits = (
                f"the agent's program has sent no request.{wrote} Expected: requests to OPENAI_BASE_URL or "
                "ANTHROPIC_BASE_URL, or its end"
            )
        warnings.warn(f"for {QUIET_S:g} s {waits}. {limit} ends the wait", RuntimeWarning, stacklevel=1)

    def _refuse_unjudged(self) -> None:
        """Raise what failed in the environment, or OutOfContext or AgentFailed where no attempt is left to judge."""
        if self._env_error is not None:
            raise self._env_error
        session, refusal, complaint = self.session, self.session.refusal, self.session.failure
        if not session.is_finished and self._program is not None and self._program.code:
            complaint = complaint or self._program.complaint
        ended_there = self._now.terminated or self._now.truncated
        is_judged = ended_there or (session.reward is not None and not complaint)
        if self._is_full and not is_judged and (complaint or self._settings.reward != "client"):
            raise self._out_of_context(complaint)
        if complaint:
            raise AgentFailed("the agent's program failed", where=self._task.id, got=session.told(complaint))
        if session.counts["n_answered_requests"] or is_judged:
            return
        if refusal is None and self._settings.reward == "client":
            return  # its reward may still come
        fix, said = "fix the program's requests: no tokens were sampled", ""
        if refusal is None and not session.counts["n_requests"]:
            fix = "send requests to OPENAI_BASE_URL or ANTHROPIC_BASE_URL, not to an address in the program's code"
            said = "the attempt ended without a request"
        raise AgentFailed(
            "no request of the agent's program was answered", where=self._task.id, got=session.told(said), hint=fix
        )

    @property
    def _is_full(self) -> bool:
        """True if the last request left no room for a reply."""
        return self.session.refusal is not None and self.session.refusal.code == CONTEXT_FULL

    def _out_of_context(self, said: str) -> OutOfContext:
        return OutOfContext(
            "context length exceeded, and the program sent no shorter request",
            where=self._task.id,
            got=self.session.told(said),
            hint="raise limits.max_context, or let the program shorten its conversation at that error",
        )

    async def _end(self) -> StepResult:
        """The end of the attempt, with what it earned."""
        settings, session = self._settings, self.session
        if settings.reward == "environment":
            now, cut = self._now, self._now.truncated and not self._now.terminated
            won = bool(now.success)
            end = StepResult(now.reply, terminated=not cut, truncated=cut, success=won, state_key=now.state_key)
            return self._since(end)
        if session.reward is None and settings.reward == "client":
            try:
                async with asyncio.timeout(settings.reward_timeout_s):
                    while session.reward is None:
                        await session.changed()
            except TimeoutError:
                if self._is_full:
                    raise self._out_of_context("") from None
                raise RewardMissing(
                    "the attempt ended without a reward, which is an infrastructure error, not a score of 0",
                    where=self._task.id,
                    got=session.told(f"no reward within {settings.reward_timeout_s:g} s of the end"),
                    expected="POST .../reward with {'reward': number}",
                    hint="post one, or let the recipe's rewards judge: environment.reward: recipe",
                ) from None
        reward = session.reward
        if reward is None:
            return StepResult("", terminated=True, success=False)
        won = reward.value >= settings.success_threshold if reward.success is None else reward.success
        told = json.dumps({"reward": reward.value, "parts": dict(reward.parts)})
        return StepResult(told, reward.value, terminated=True, success=won)

    async def _step_environment(self, action: str) -> Mapping[str, Any]:
        """Do an action of the agent in the environment."""
        assert self._env is not None
        if self._now.terminated or self._now.truncated:
            return {"reply": "The episode is over.", "done": True, "valid": False, "success": bool(self._now.success)}
        self._now = await self._from_env(self._env.step(action))
        self._earned += self._now.reward
        self._is_valid = self._is_valid and self._now.valid
        done = self._now.terminated or self._now.truncated
        return {"reply": self._now.reply, "done": done, "valid": self._now.valid, "success": self._now.success}

    async def _from_env(self, work: Any) -> StepResult:
        try:
            found: StepResult = await work
            return found
        except EpisodeEnded as ended:
            self.session.refusal = None  # it is the environment that ends the attempt
            self.session.end(failure=f"the environment failed: {ended.outcome.value}: {ended.detail}")
            kind = AgentFailed if ended.outcome is Outcome.AGENT_ERROR else EnvError
            self._env_error = kind("the environment of the attempt failed", where=self._task.id, got=ended.detail)
            raise self._env_error from ended

    def _since(self, result: StepResult) -> StepResult:
        """The result with what the environment gave since the last one."""
        found = replace(result, reward=result.reward + self._earned, valid=self._is_valid)
        self._earned, self._is_valid = 0.0, True
        return found


def payload(task: Task, *, with_reference: bool) -> dict[str, Any]:
    """Task as the agent's program receives it."""
    messages = [{"role": m.role.value, "content": m.content} for m in task.messages]
    told = {
        "id": task.id,
        "seed": task.seed,
        "messages": messages,
        **{key: value for key, value in task.info.items() if key != "named"},
    }
    return told | ({"reference": task.reference} if with_reference else {})


#: Bytes of the longest task in a variable, of which Linux allows 128 KiB with its name.
_LONGEST_VARIABLE = 120_000


def variables_of(url: str, session: Session) -> dict[str, str]:
    """Variables by which the clients of OpenAI and Anthropic find the session, and a program its task.

    A longer task than a variable may be is on standard input alone.
    """
    task = json.dumps(session.task)
    return {
        **({"RLHF_TASK": task} if len(task) < _LONGEST_VARIABLE else {}),
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": session.key,
        "RLHF_SESSION": url,
        "RLHF_KEY": session.key,
    }


def _unsampled(text: str, asked: ChatRequest) -> ChatReply:
    """A reply that no policy sampled."""
    return ChatReply(text, "", (), Finish.STOP, 0, 0)
