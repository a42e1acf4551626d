"""Turn and trajectory: the record of a finished episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rlhf.data.generation import DEMONSTRATED, Generation


class Outcome(StrEnum):
    """End of an episode. The last five are infrastructure errors: nothing trains on them."""

    SOLVED = "solved"
    FAILED = "failed"  #: the environment ended the episode without success
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"  #: the context is full
    TIMEOUT = "timeout"  #: the episode or one of its calls took longer than allowed
    ENV_ERROR = "env_error"
    AGENT_ERROR = "agent_error"
    ENGINE_ERROR = "engine_error"
    REWARD_ERROR = "reward_error"

    @property
    def is_infrastructure_error(self) -> bool:
        """True if a part failed, not the policy: the trajectory is no evidence about the policy."""
        return self in _INFRASTRUCTURE_ERRORS


#: Note of an action (`Action.notes`) that says which seat of a game had the turn.
SEAT = "seat"
_INFRASTRUCTURE_ERRORS = frozenset(
    {Outcome.TIMEOUT, Outcome.ENV_ERROR, Outcome.AGENT_ERROR, Outcome.ENGINE_ERROR, Outcome.REWARD_ERROR}
)


@dataclass(frozen=True, slots=True)
class Action:
    """Decision of an agent in one turn.

    Attributes:
        text: what the environment is given.
        generations: every call of the policy behind it, in order.
        error: why the text could not be read as an action; the environment is then not stepped and the agent reads
            this as its next observation.
        notes: what the agent keeps of this turn for later ones, by name: a summary, a subgoal. An agent holds nothing
            between turns itself, so an episode can be replayed, branched and resumed from its turns alone.
        parts: what the environment is given one after another in this turn, such as several calls of tools; empty where
            it is given `text`, which otherwise holds all of them, each on a line of its own.
        reply_text: the whole reply that the action was read from, thoughts and all, as text for rewards to read;
            empty where it was read from no reply, or from more than one. Stored as `said`.
    """

    text: str
    generations: tuple[Generation, ...] = ()
    error: str | None = None
    notes: Mapping[str, str] = field(default_factory=dict, hash=False)
    parts: tuple[str, ...] = ()
    reply_text: str = ""

    @property
    def steps(self) -> tuple[str, ...]:
        """Actions given to the environment in this turn, in order."""
        return self.parts or (self.text,)


@dataclass(frozen=True, slots=True)
class Turn:
    """An action and the environment's reply.

    Attributes:
        action: what the agent did.
        reply: what the agent read in return.
        reward: the environment's own reward of this turn.
        state_key: raw environment state in which the action was chosen, for state-level credit; None if unknown.
        valid: False if the action could not be parsed, or the environment did not understand it.
        duration_s: wall-clock seconds from the observation to the reply; 0 where they are not known. Turns are equal
            whatever time they took.
    """

    action: Action
    reply: str
    reward: float = 0.0
    state_key: str | None = None
    valid: bool = True
    duration_s: float = field(default=0.0, compare=False)

    @property
    def generations(self) -> tuple[Generation, ...]:
        """The policy's calls of this turn."""
        return self.action.generations


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The record of a finished episode.

    Attributes:
        task_id: the task attempted; the key of its group.
        attempt: number of this attempt within the group, from 0.
        opening: what the agent read first.
        turns: in order.
        outcome: how it ended.
        detail: for an outcome that is an error, what happened.
        duration_s: wall-clock seconds of the episode.
        n_retries: earlier attempts that were thrown away because a part failed.
        n_given: leading turns that belong to the task (`Task.prefix`) and not to the policy; they hold no generations.
        parent: number of the attempt that this one branched off; None for one that was played from the task's start.
        n_shared: leading turns that it has in common with that attempt, those given among them; 0 without a parent.
    """

    task_id: str
    attempt: int
    opening: str
    turns: tuple[Turn, ...]
    outcome: Outcome
    detail: str = ""
    duration_s: float = 0.0
    n_retries: int = 0
    n_given: int = 0
    parent: int | None = None
    n_shared: int = 0

    @property
    def solved(self) -> bool:
        """True if the environment's own success criterion was met."""
        return self.outcome is Outcome.SOLVED

    @property
    def generations(self) -> tuple[Generation, ...]:
        """All generations in order, of all turns."""
        return tuple(g for turn in self.turns for g in turn.generations)

    @property
    def own_turns(self) -> tuple[Turn, ...]:
        """The turns in which the policy acted in this very episode: neither given, nor replayed from another."""
        return self.turns[max(self.n_given, self.n_shared) :]

    @property
    def is_demonstration(self) -> bool:
        """True if another than the policy played it; its tokens are off-policy."""
        return any(g.policy_version == DEMONSTRATED for g in self.generations)

    @property
    def n_tokens(self) -> int:
        """Sampled tokens; of a reply from a server, as many as it counted."""
        return sum(g.n_tokens if g.usage is None else g.usage[1] for g in self.generations)

    @property
    def n_policy_tokens(self) -> int:
        """Tokens that the policy sampled, and no opponent in its place (`Generation.opponent`)."""
        return sum(g.n_tokens for g in self.generations if not g.opponent)
