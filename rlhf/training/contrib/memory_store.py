"""A run's store: read by its episodes, written between its steps, copied into its checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agents.base import Reply
from agents.stores import copies
from agents.stores.kind import QueriesPolicy, as_whole_tasks, asks_policy
from agents.stores.remembering import Bound, Remembering
from agents.stores.store import Store
from rlhf.data import Message, ScoredGroup
from rlhf.errors import StoreError
from rlhf.inference.seeds import stable_seed
from rlhf.processes import current
from rlhf.rollout.policy_client import bounded, sampled
from rlhf.rollout.runner import RolloutRunner
from rlhf.spans import span
from rlhf.training.context import LiveStage, RunContext
from rlhf.training.hooks.base import StageHook, Step

#: Name under which a store keeps of which kind it is.
KIND = "kind of store"


@dataclass(frozen=True)
class StoreKeeper:
    """The store of a run. Of several processes the first writes, and all read.

    Attributes:
        agent: whose store it is.
        store: open to write; None in the other processes.
        bound: the agent with the store, open for reading, for the episodes of the run.
    """

    agent: Remembering
    store: Store | None
    bound: Bound

    @classmethod
    def of(
        cls, agent: Remembering, folder: Path, found: Path | None, split: str, judged: Collection[str], kind: str
    ) -> StoreKeeper:
        """The store of the run in `folder`: as checkpoint `found` has it, else new.

        All processes call this together. `kind` is that of the agent's store, as a recipe names it.

        Raises:
            StoreError: the checkpoint's is damaged, holds what a task left that judges the policy, is of another kind,
                or cannot be opened.
        """
        if asks_policy(agent.store) and current().n > 1:
            raise StoreError(
                "this kind of store calls the policy between steps, which needs a single process",
                where="agent.store",
                got=f"{type(agent.store).__name__} in {current().n} processes",
                expected="one process, or a kind that does not call the policy",
            )
        store, path = None, folder / copies.FILE
        if current().is_main:
            if found is None:
                path.unlink(missing_ok=True)
            else:
                copies.restore(found, path)
            # The recipe was checked: the split is one of the environment's, whatever these are called.
            store = Store(path, split=split, splits=(split,), judged=frozenset(judged))
            _check_kind(store, kind.rpartition("/")[2], folder)  # a file of one's own may move
        current().gather(None, "the store")
        return cls(agent, store, Bound(agent, Store(path)))

    async def learn(self, groups: Sequence[ScoredGroup], runner: RolloutRunner, seed: str) -> dict[str, float]:
        """Update on a finished step, once, whole or not at all. Returns what is logged of it.

        Args:
            groups: of all tasks of the step.
            runner: whose policy a kind may ask.
            seed: of what it says then, another in each step.

        Raises:
            StoreError, EngineError: nothing of the step is stored.
        """
        figures: dict[str, float] = {}
        if self.store is not None and self.store.split is not None:
            kind, groups = self.agent.store, as_whole_tasks(groups)
            client = StorePolicyClient(runner, seed)
            with self.store.transaction():
                if isinstance(kind, QueriesPolicy) and asks_policy(kind):
                    figures = dict(await kind.learn_asking(self.store, groups, self.store.split, client))
                else:
                    figures = dict(kind.learn(self.store, groups, self.store.split))
            figures["store/n_chars"] = float(sum(len(entry.text) for entry in self.store.entries()))
            if client.n_calls:
                await runner.engine.release(client.session)
        current().gather(None, "the store")
        return figures

    def save(self, folder: Path) -> None:
        """Copy the store into the folder of a checkpoint; in the process that writes it."""
        if self.store is not None:
            copies.save(self.store, folder)

    def close(self) -> None:
        """Close the file."""
        self.bound.store.close()
        if self.store is not None:
            self.store.close()


def _check_kind(store: Store, kind: str, folder: Path) -> None:
    """Refuse a store of another kind; an unmarked one takes this kind."""
    before = store.kept(KIND)
    if before and before != kind:
        store.close()
        raise StoreError(
            "the store of this run is of another kind",
            where="agent.store.kind",
            got=kind,
            expected=before,
            hint=f"write {before} and its keys into {folder / 'recipe.yaml'} again, or start a new run",
        )
    if not before:
        store.keep(KIND, kind)


def opened(agent: Remembering, checkpoint: Path, judged: Collection[str]) -> Bound:
    """The agent of an evaluation: with the store of a checkpoint, which it only reads.

    Raises:
        StoreError: there is none, it is damaged, or holds what a task left that judges the policy.
    """
    copies.check(checkpoint)
    return Bound(agent, Store(checkpoint / copies.FILE, judged=frozenset(judged)))


class StorePolicyClient:
    """Policy client of a store between two steps; its calls run one after the other."""

    def __init__(self, runner: RolloutRunner, seed: str) -> None:
        self._runner, self._seed, self.session, self.n_calls = runner, seed, f"store/{seed}", 0

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        role: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        """Render `messages` and sample one reply; see `agents.base.PolicyHandle`."""
        engine, renderer, limits = self._runner.engine, self._runner.renderer, self._runner.limits
        prompt = renderer.prompt(messages, tools, role)
        asked = min(limits.max_tokens, max_tokens or limits.max_tokens)
        limit = bounded(asked, prompt, engine, limits, self.session)
        sampling = replace(limits.sampling(1.0), max_tokens=limit, seed=stable_seed(self._seed, self.n_calls))
        self.n_calls += 1
        generation = await sampled(engine, prompt, sampling, self.session)
        return Reply(renderer.reply_text(generation.token_ids), replace(generation, role=role))

    def n_tokens(self, messages: Sequence[Message]) -> int:
        """Length of the prompt that `messages` make."""
        return len(self._runner.renderer.prompt(messages).token_ids)


@dataclass(frozen=True)
class StoreHook(StageHook):
    """Writes what a finished step taught into the store of the run, which checkpoints keep themselves."""

    keeper: StoreKeeper

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """See `StoreKeeper.learn`."""
        with span("store"):
            seed = f"{run.seed}/{run.state.label}/{step.number}"
            step.metrics |= await self.keeper.learn(step.all_groups, run.runner, seed)
