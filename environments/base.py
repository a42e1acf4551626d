"""The contract of a text environment.

An environment is a frozen dataclass: its fields are its recipe keys. It lists tasks and starts episodes. An episode is
one attempt and is used once: there is no reset. The smallest one:

    @dataclass(frozen=True)
    class Echo:
        n_tasks: int = 100

        def tasks(self, split: str) -> Iterable[Task]:
            first = {"train": 0, "test": 1_000_000}[split]
            return [Task(id=f"echo/{split}/{i}", seed=first + i) for i in range(self.n_tasks)]

        def start(self, task: Task) -> Episode:
            return EchoEpisode(str(task.seed))

    class EchoEpisode:
        def __init__(self, word: str) -> None:
            self.word, self.opening = word, StepResult(f"Say {word}.", state_key="start")

        async def step(self, action: str) -> StepResult:
            solved = action == self.word
            return StepResult("Right." if solved else "Wrong.", reward=float(solved), terminated=True, success=solved)

        async def close(self) -> None: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rlhf.capabilities import Capability, CapabilityView
from rlhf.data import Outcome, Task
from rlhf.errors import EnvError


class TerminalEnvError(EnvError):
    """Error that ends the attempt with a fixed outcome, and is not retried."""

    outcome = Outcome.ENV_ERROR


class CallTimeoutError(TerminalEnvError):
    """Call timeout: the attempt ends as a timeout and is not repeated."""

    outcome = Outcome.TIMEOUT


class AgentFailed(TerminalEnvError):
    """An agent outside of this process failed: the attempt says nothing of the policy."""

    outcome = Outcome.AGENT_ERROR


class OutOfContext(TerminalEnvError):
    """Full context of an agent outside of this process: the attempt is cut there, which is no infrastructure error."""

    outcome = Outcome.TOKEN_LIMIT


class RewardMissing(TerminalEnvError):
    """Missing reward of an agent outside this process: the attempt is a failure, and never a zero."""

    outcome = Outcome.REWARD_ERROR


#: Seconds that the present call may take, for environments that keep limits themselves and say so with an attribute
#: `keeps_limits`: they know for how long a call has only been waiting for others.
CALL_LIMIT_S: ContextVar[float | None] = ContextVar("CALL_LIMIT_S", default=None)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Observation, reward and end of an environment step.

    Attributes:
        reply: what the agent reads.
        reward: reward of this step, in the environment's own units.
        terminated: the task is over, won or lost.
        truncated: the environment's own step limit cut the episode.
        state_key: raw state after the step, without history; equal keys mean equal states. None if unknown.
        success: at the end, whether the official criterion is met; None before, or True where it is met already.
        valid: False if the environment did not understand the action.
        admissible_actions: sorted actions possible now; empty where the environment cannot list them.
        seat: in a game that one policy plays for several, who reads `reply` and acts next; else empty. `reward` is then
            that of the seat that has just acted.
    """

    reply: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    state_key: str | None = None
    success: bool | None = None
    valid: bool = True
    admissible_actions: tuple[str, ...] = ()
    seat: str = ""


@runtime_checkable
class Episode(Protocol):
    """Attempt at a task; used once.

    `opening` is what the agent reads first. A synchronous `step` may be declared `async` and simply return. If the
    environment's class sets `inline = True`, steps run on the event loop (only for steps well under a millisecond that
    cannot hang); otherwise each runs in a worker thread under a time limit.
    """

    opening: StepResult

    async def step(self, action: str) -> StepResult:
        """Do one action."""

    async def close(self) -> None:
        """Free everything; called once on every path, also after an error."""


@runtime_checkable
class Environment(Protocol):
    """Lists tasks and starts episodes. Frozen and picklable; its fields are its recipe keys."""

    def tasks(self, split: str) -> Iterable[Task]:
        """All tasks of a split (`train`, `dev`, `test`), in the same order every time."""

    def start(self, task: Task) -> Episode:
        """Begin one attempt."""


@runtime_checkable
class Oracle(Protocol):
    """An environment that can demonstrate."""

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Actions that solve `task` from the state reached by `taken`, or None if none are known."""


@dataclass(frozen=True, slots=True)
class Properties:
    """Declared capabilities of an environment; `rlhf check environment` tests them.

    Attributes:
        deterministic: one task and one list of actions give one transcript, in any process.
        replayable: replaying the actions of an episode reaches the same state, so (task, actions) is a snapshot.
        thread_safe: episodes may run in several threads at once.
        inline: a step takes well under a millisecond, some at worst, and cannot hang, so it runs on the event loop.
        oracle: `plan` is offered.
        splits: names that `tasks` accepts.
        package: distribution and version the episodes come from, for the run's record.
        isolated: episodes run in worker processes, because the package is not safe beside others in one process: it
            leaks, keeps state of its own for the whole process, or hangs.
        interleaves: several episodes may be alive in one process as long as one thread steps them in turn, as is so of
            those that are thread-safe; they then share worker processes.
        seats: names of the seats that the agent plays, where it plays several (`StepResult.seat`).
        repeats: tasks of two splits may be the same to the agent, told the same at first and solved by the same: the
            package draws its small worlds by seeds and knows few of them, or there is one opening alone.
        judged_by_rewards: a reward of the recipe says what is solved: the one with the key `success_threshold`, else
            the first that compares with the reference. What the environment says itself counts where no recipe is at
            hand.
    """

    deterministic: bool = False
    replayable: bool = False
    thread_safe: bool = False
    inline: bool = False
    oracle: bool = False
    splits: tuple[str, ...] = ("train", "test")
    package: str = ""
    isolated: bool = False
    interleaves: bool = False
    seats: tuple[str, ...] = ()
    repeats: bool = False
    judged_by_rewards: bool = False


def after_end(where: str, action: str) -> EnvError:
    """The error for an action after the end of an episode, or after it was closed."""
    return EnvError("the episode is over", where=where, got=action[:80], hint="start a new episode")


class Capabilities(CapabilityView):
    """Optional attributes and methods of an environment, with a default for each that it leaves out."""

    properties = Capability[Properties | None](None, Properties)
    """Properties of the environment."""
    inline = Capability(False, bool)
    """Calls run on the event loop, whatever `properties` say: one that wraps others may only wait there."""
    keeps_limits = Capability(False, bool)
    """True if it limits calls itself, see `CALL_LIMIT_S`."""
    demonstrates = Capability(True, bool)
    """True if `plan` can be called; a wrapper may lack it for these members."""
    demonstrates_for = Capability[Callable[[Task], bool] | None](None, Callable)
    """True if `plan` can be called for a task, of a wrapper whose members differ in that."""
    max_episodes = Capability[int | None](None, int)
    """Maximal number of episodes alive at a time; None for any number."""
    max_steps = Capability[int | None](None, int)
    """Steps after which an episode is cut; None where nothing is known."""
    agent_defaults = Capability[Mapping[str, Any]]({}, Mapping)
    """Recipe keys that it suggests for a chat agent."""
    limits_defaults = Capability[Mapping[str, Any]]({}, Mapping)
    """Recipe keys that it suggests for limits."""
    offers_tools = Capability[bool | None](None, bool)
    """True if it takes tool calls; None where undeclared."""
    tools = Capability[object](())
    """Descriptions of its tools."""
    opponent = Capability[object](())
    """Opponent in a game for two; an empty tuple where there is no such key."""
    members = Capability[Callable[[], Sequence[Any]] | None](None, Callable)
    """Gives the environments that it is made of."""
    environment = Capability[object](None)
    """The environment that it serves."""
    plan = Capability[Callable[..., Any] | None](None, Callable)
    """See `Oracle`."""
    recall = Capability[Callable[..., Any] | None](None, Callable)
    """Bounded summary of observations up to the actions `taken` that later ones may need, of `(task, taken)`: for
    demonstrations to agents with memory. Of a wrapper it may be that of the environment within."""
    subgoal = Capability[Callable[..., Any] | None](None, Callable)
    """Subgoal of the oracle's next action after those `taken`, the same words until it is reached, of `(task, taken)`:
    for demonstrations to agents that plan. Of a wrapper likewise."""
    fingerprint = Capability[Callable[[], str] | None](None, Callable)
    """Gives a digest of the data that it reads."""
    n_merged = Capability[Callable[[str], int] | None](None, Callable)
    """Rows of a split that are no tasks, as an earlier row has their prompt and answer."""
    close = Capability[Callable[[], object]](lambda: None, Callable)
    """Frees what its episodes share, such as workers."""

    @property
    def is_inline(self) -> bool:
        """True if calls run on the event loop, by the properties or by the attribute."""
        return properties_of(self.part).inline or self.inline


class EpisodeCapabilities(CapabilityView):
    """Optional methods of an episode."""

    opening = Capability[object](None)
    """See `Episode`."""


def properties_of(environment: object) -> Properties:
    """Return the declared properties; an environment that declares none gets the cautious defaults."""
    return Capabilities(environment).properties or Properties()


def can_demonstrate(environment: object, task: Task | None = None) -> bool:
    """True if the environment has a `plan`; wrappers declare it by an attribute `demonstrates`.

    Args:
        environment: of one kind, or made of several.
        task: asks for this one alone; None for all.
    """
    own = Capabilities(environment)
    if task is not None and own.demonstrates_for is not None:
        return own.demonstrates_for(task)
    return isinstance(environment, Oracle) and own.demonstrates


def member_environments(environment: object) -> list[tuple[str, object]]:
    """Member environments with their recipe paths; none of a single environment."""
    has = Capabilities(environment)
    if has.members is not None:
        return [(f"[{i}]", member) for i, member in enumerate(has.members())]
    return [] if has.environment is None else [(".environment", has.environment)]


def max_concurrent_episodes(environment: object) -> int | None:
    """Return how many episodes may be alive at a time (`max_episodes` of the environment), or None."""
    return Capabilities(environment).max_episodes
