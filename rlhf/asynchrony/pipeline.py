"""State machine of asynchronous training, without threads, processes, tensors or a clock.

Groups have ordinals from one stream of tasks, B of them for each step. Version v of the weights is the policy after v
steps; t is the newest version that every server has. Three rules hold the age of what is trained within the bound S:

- a new group begins while fewer than (t + depth + 1) · B have begun, with depth <= S;
- nothing that is finished is thrown away, and a group whose worker died begins again under its own ordinal;
- `in_order`, step k trains the ordinals kB to (k + 1)B - 1, whoever finished first.

A group that began under t has ordinal n < (t + depth + 1) · B, so it is trained at step n // B <= t + depth, and no
token of it is by a version before t: its age, the step less the oldest version of a token, is at most depth.

`first_finished` trains the groups that finished first, as far as every group still is trained in time: one that began
under t has its turn by step t + S (`rlhf.asynchrony.completion_order`).

With deterministic weight updates, version v + 1 is installed once everything that may begin under v has finished. Then
group n is played wholly by version max(0, n // B - depth), whatever the clock says.

Every token is in one place: generated = trained + stored + running + failed, which is checked after every step.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rlhf.asynchrony.completion_order import first_finished
from rlhf.errors import CheckpointError, DeliveryError, TrainingError

Order = Literal["in_order", "first_finished"]


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of a pipeline: steps, staleness bound, order, weight updates.

    Attributes:
        n_per_step: B, groups of a step.
        n_steps: of the stage.
        staleness: S, the most versions that a trained token may be old.
        depth: steps that may be played ahead, at most S.
        order: in which finished groups are trained.
        is_fixed: whether versions are installed by count and not by the clock.
    """

    n_per_step: int
    n_steps: int
    staleness: int = 1
    depth: int = 1
    order: Order = "in_order"
    is_fixed: bool = False


@dataclass(slots=True)
class Group:
    """A group that began and is not trained yet.

    Attributes:
        begun: version that every server had then.
        sampled: version -> tokens that it sampled.
        kept: of these, those of attempts that did not fail, once it is finished.
    """

    begun: int
    sampled: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)

    @property
    def n_sampled(self) -> int:
        """Tokens of it so far."""
        return sum(self.sampled.values())

    @property
    def n_kept(self) -> int:
        """Tokens of it that count."""
        return sum(self.kept.values())

    @property
    def oldest(self) -> int:
        """The oldest version that sampled any of it; that of its begin where it has no tokens."""
        return min(self.sampled, default=self.begun)


@dataclass(slots=True)
class Ledger:
    """Ledger of sampled tokens: generated = trained + stored + running + failed.

    Attributes:
        generated: by the servers, as they say.
        trained: of groups that a step was given.
        stored: of groups that are finished and wait.
        running: of groups that are played.
        failed: of attempts that failed or were begun again, and of groups given back.
    """

    generated: int = 0
    trained: int = 0
    stored: int = 0
    running: int = 0
    failed: int = 0

    @property
    def is_even(self) -> bool:
        """True if every token is in one place."""
        return self.generated == self.trained + self.stored + self.running + self.failed


class Pipeline:
    """Scheduler of asynchronous training: which groups are played and trained, and when weights are installed.

    Attributes:
        rules: it is held to.
        step: steps that are trained, and so the newest version there is.
        n_begun: ordinals that have begun.
        servers: name -> version that it has.
        running: ordinal -> group.
        store: ordinal -> finished group, in the order in which they finished.
        returned: ordinals that are to begin again.
        is_held: whether no new ordinal begins: before a snapshot.
        n_given_back: groups that began again.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.step = self.n_begun = self.n_given_back = 0
        self.servers: dict[str, int] = {}
        self.running: dict[int, Group] = {}
        self.store: dict[int, Group] = {}
        self.returned: list[int] = []
        self.is_held = False
        self._due: tuple[int, ...] | None = None
        self._generated = self._trained = self._failed = 0

    # --- servers and versions ---

    @property
    def version(self) -> int:
        """The newest version that every server in use has."""
        return min(self.servers.values(), default=self.step)

    def join(self, server: str, version: int) -> None:
        """Use a server from now on. Raises DeliveryError where groups that run could meet older weights on it."""
        if not self.version <= version <= self.step:
            raise DeliveryError(
                "a server joined with weights of another step",
                where=f"server {server}",
                got=f"version {version}",
                expected=f"version {self.version} to {self.step}",
                hint="deliver the current weights to it first",
            )
        self.servers[server] = version

    @property
    def may_install(self) -> bool:
        """True if the next version may be installed, now that it is trained."""
        if self.step <= self.version:
            return False
        return not self.rules.is_fixed or (self.n_begun >= self._limit and self.is_drained)

    def install(self, server: str, version: int) -> None:
        """Note that a server has other weights. Raises DeliveryError for weights that it cannot or must not have."""
        if not self.servers[server] <= version <= self.step:
            raise DeliveryError(
                "a server reports weights that it was not sent",
                where=f"server {server}",
                got=f"version {version}",
                expected=f"version {self.servers[server]} to {self.step}",
                hint="deliver again, or restart the server",
            )
        if version > self.servers[server] and not self.may_install:
            raise DeliveryError(
                "weight_update is deterministic, and weights arrived while groups still run with the previous version",
                where=f"server {server}",
                got=f"{len(self.running) + len(self.returned)} groups not finished",
                expected="none",
                hint="wait until `may_install`",
            )
        self.servers[server] = version

    # --- groups ---

    @property
    def _limit(self) -> int:
        """Ordinals that may have begun under the present version."""
        rules = self.rules
        return min(self.version + rules.depth + 1, rules.n_steps) * rules.n_per_step

    @property
    def is_drained(self) -> bool:
        """True if every group that began has finished."""
        return not self.running and not self.returned

    @property
    def may_begin(self) -> bool:
        """True if `begin` has an ordinal to give."""
        return bool(self.returned) or (not self.is_held and self.n_begun < self._limit)

    def begin(self) -> int | None:
        """Return the ordinal of a group to play now, one given back before a new one; None where none may begin."""
        if not self.may_begin:
            return None
        if self.returned:
            ordinal = heapq.heappop(self.returned)
        else:
            ordinal, self.n_begun = self.n_begun, self.n_begun + 1
        self.running[ordinal] = Group(self.version)
        return ordinal

    def sampled(self, ordinal: int, version: int, n_tokens: int) -> None:
        """Take in tokens of a group that runs. Raises DeliveryError where weights are older than the servers' were."""
        group = self.running[ordinal]
        if not group.begun <= version <= self.step:
            raise DeliveryError(
                "a server sampled with the wrong weights",
                where=f"group {ordinal}",
                got=f"version {version}",
                expected=f"version {group.begun}, which every server had when the group began, to {self.step}",
                hint="the server kept old weights: restart it",
            )
        group.sampled[version] = group.sampled.get(version, 0) + n_tokens
        self._generated += n_tokens

    def finish(self, ordinal: int, kept: Mapping[int, int]) -> None:
        """Store a group that is over; `kept` says how many tokens of each version its attempts have that count.

        Raises:
            TrainingError: the attempts hold more tokens of a version than were sampled.
        """
        group = self.running[ordinal]
        group.kept = dict(kept)
        if any(n > group.sampled.get(version, 0) for version, n in kept.items()):
            raise TrainingError(
                "the attempts at a task hold tokens that no server sampled",
                where=f"group {ordinal}",
                got=f"tokens by version {group.kept}",
                expected=f"at most {group.sampled}",
            )
        self.store[ordinal] = self.running.pop(ordinal)
        self._failed += group.n_sampled - group.n_kept

    def give_back(self, ordinal: int) -> None:
        """Restart a group from its seeds, because its worker was lost."""
        self._failed += self.running.pop(ordinal).n_sampled
        self.n_given_back += 1
        heapq.heappush(self.returned, ordinal)

    # --- training ---

    def batch(self) -> tuple[int, ...] | None:
        """Return the ordinals that the next step trains, in order; None while they are not finished or none is left.

        They stay the same until they are trained, whatever finishes or dies meanwhile: others only gain time by that.
        """
        if self._due is None:
            self._due = self._next()
        return self._due

    def _next(self) -> tuple[int, ...] | None:
        """The next step; with deterministic weight updates none before the version of the last one is installed."""
        rules, step = self.rules, self.step
        if step >= rules.n_steps or (rules.is_fixed and self.version < step):
            return None
        if rules.order == "in_order":
            due = range(step * rules.n_per_step, (step + 1) * rules.n_per_step)
            return tuple(due) if all(ordinal in self.store for ordinal in due) else None
        waiting = [group.begun for group in self.running.values()] + [self.version] * len(self.returned)
        stored = {ordinal: group.oldest for ordinal, group in self.store.items()}
        return first_finished(stored, waiting, step=step, n=rules.n_per_step, staleness=rules.staleness)

    def waited_for(self) -> list[int]:
        """Return the ordinals without which the next step cannot begin, lowest first; in order of begin otherwise."""
        first = self.step * self.rules.n_per_step
        last = first + self.rules.n_per_step if self.rules.order == "in_order" else self.n_begun
        return sorted(ordinal for ordinal in (*self.running, *self.returned) if ordinal < last)

    def age(self, ordinal: int) -> int:
        """Return how many versions the oldest token of a finished group is behind the next step."""
        return self.step - self.store[ordinal].oldest

    def train(self, ordinals: Sequence[int]) -> dict[int, int]:
        """Note that a step was trained on `ordinals`; returns how many of its tokens are of each age.

        Raises:
            TrainingError: these are not the groups of the step, one is too old, or the ledger is not even.
        """
        if tuple(ordinals) != self.batch():
            raise self._broken("a step trains other groups than its own", str(tuple(ordinals)), str(self.batch()))
        oldest = max(map(self.age, ordinals))
        if oldest > self.rules.staleness:
            raise self._broken("a group is too old to train on", f"age {oldest}", f"at most {self.rules.staleness}")
        tokens_by_staleness: dict[int, int] = {}
        for ordinal in ordinals:
            for version, n in self.store.pop(ordinal).kept.items():
                tokens_by_staleness[self.step - version] = tokens_by_staleness.get(self.step - version, 0) + n
        self._trained += sum(tokens_by_staleness.values())
        self._due = None
        self.step += 1
        self.check()
        return tokens_by_staleness

    def check(self) -> None:
        """Raise TrainingError unless every token and every ordinal is in one place."""
        ledger, n_trained = self.ledger, self.step * self.rules.n_per_step
        if not ledger.is_even:
            raise self._broken(
                "the ledger of tokens is not even", str(asdict(ledger)), "generated = the sum of all others"
            )
        n = len(self.running) + len(self.returned) + len(self.store) + n_trained
        if n != self.n_begun:
            raise self._broken("a group was lost or counted twice", f"{n} groups", f"{self.n_begun} that began")

    @property
    def ledger(self) -> Ledger:
        """The present ledger; running and stored tokens are counted anew."""
        stored = sum(group.n_kept for group in self.store.values())
        running = sum(group.n_sampled for group in self.running.values())
        return Ledger(self._generated, self._trained, stored, running, self._failed)

    def _broken(self, what: str, got: str, expected: str) -> TrainingError:
        return TrainingError(
            what, where=f"step {self.step + 1}", got=got, expected=expected, hint="report this as a bug"
        )

    # --- checkpoints ---

    @property
    def may_cut(self) -> bool:
        """True if `state` may be called: with deterministic weight updates, once the newest version is installed."""
        return not self.rules.is_fixed or self.version == self.step

    def state(self) -> dict[str, Any]:
        """Return a snapshot, plain values from which `restored` makes the pipeline again. What runs then begins again.

        Raises:
            TrainingError: weight updates are deterministic, and the newest version is not installed.
        """
        if not self.may_cut:
            raise self._broken(
                "a snapshot before the delivery of a step", f"version {self.version}", f"version {self.step}"
            )
        running = sorted((*self.running, *self.returned))
        failed = self._failed + self.ledger.running
        stored = [(ordinal, g.begun, _pairs(g.sampled), _pairs(g.kept)) for ordinal, g in self.store.items()]
        return {
            "rules": asdict(self.rules),
            "counts": {"step": self.step, "n_begun": self.n_begun, "n_given_back": self.n_given_back},
            "tokens": {"generated": self._generated, "trained": self._trained, "failed": failed},
            "running": running,
            "store": stored,
        }

    @classmethod
    def restored(cls, rules: Rules, state: Mapping[str, Any]) -> Pipeline:
        """Return the pipeline of a snapshot, without servers, which join with the version of its step.

        Raises:
            CheckpointError: it was taken under other rules, or a stored group is too old for the present bound.
        """
        for name in ("n_per_step", "order", "is_fixed"):
            if state["rules"][name] != getattr(rules, name):
                raise CheckpointError(
                    "groups that were played ahead do not fit the recipe",
                    where=f"asynchrony, {name}",
                    got=str(getattr(rules, name)),
                    expected=str(state["rules"][name]),
                    hint="restore the recipe of the run",
                )
        made = cls(rules)
        for name, value in state["counts"].items():
            setattr(made, name, value)
        made._generated, made._trained, made._failed = (state["tokens"][f] for f in ("generated", "trained", "failed"))
        made.returned = list(state["running"])
        heapq.heapify(made.returned)
        made.store = {o: Group(b, dict(s), dict(k)) for o, b, s, k in state["store"]}
        made.check()
        keys = {"staleness": "staleness", "depth": "max_steps_ahead"}
        lowered = [name for name in keys if getattr(rules, name) < state["rules"][name]]
        if lowered and made.n_begun > made.step * rules.n_per_step:
            raise CheckpointError(
                "stored groups are further ahead than the recipe allows now",
                where=f"asynchrony.{keys[lowered[0]]}",
                got=str(getattr(rules, lowered[0])),
                expected=str(state["rules"][lowered[0]]),
                hint="restore it, or lower it in a new run",
            )
        return made


def _pairs(counts: Mapping[int, int]) -> list[tuple[int, int]]:
    return list(counts.items())
