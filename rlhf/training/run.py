"""Live run: the built parts of a recipe, its state, folder, metrics and checkpoints."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from rlhf import locks
from rlhf.errors import CheckpointError, DeliveryError, RlhfError
from rlhf.given_parts import how_to_resume
from rlhf.inference.engine import SleepableEngine
from rlhf.processes import ProcessError, current
from rlhf.rollout.runner import RolloutBatch, RolloutRunner
from rlhf.rollout.scoring import WeightedReward
from rlhf.sinks import Metrics
from rlhf.spans import span
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.background_evaluation import BackgroundEvaluation, FinishedEvaluation, PendingEvaluation
from rlhf.training.cautions import cautions
from rlhf.training.checkpoints import store
from rlhf.training.checkpoints.store import State
from rlhf.training.checkpoints.writer import Writer
from rlhf.training.context import LiveStage, Progress, RecordGroups, is_due
from rlhf.training.contrib.memory_store import StoreKeeper
from rlhf.training.contrib.profiling import Profiler
from rlhf.training.hooks.callbacks import Callbacks
from rlhf.training.out_of_memory import explain_engine_out_of_memory
from rlhf.training.policy.model import Policy
from rlhf.training.publisher import Publisher
from rlhf.training.rollouts_ahead import Lookahead


class StageEnvironment(Protocol):
    """Environment, limits and rewards that a stage may have of its own."""

    @property
    def environment(self) -> Any:
        """Environment of its attempts."""

    @property
    def limits(self) -> Any:
        """Limits of its attempts."""

    @property
    def rewards(self) -> Mapping[str, WeightedReward]:
        """Rewards of its attempts, by name."""


class Interrupted(RlhfError):
    """The run was stopped by its user; everything up to the last finished step is saved."""


@dataclass
class Run:
    """Live run: policy, rollout runner, publisher, metrics and checkpoints.

    Attributes:
        folder: where everything is written.
        policy: shared by trainer and engine.
        runner: turns tasks into scored groups with the policy's engine, in the environment of the present stage.
        stage_environments: environment, limits and rewards of the stages that have their own, by index.
        base_runner: runner of the recipe's environment, where the present stage has its own; else None.
        publisher: delivers the policy to that engine.
        evaluate: measures the policy on unseen tasks; takes a name for the result and whether it is the full set.
        estimate: confidence interval of a share, of successes and their task ids.
        demonstrations: played beforehand for each supervised stage, by its index.
        evaluates_before: whether the policy is measured before the first stage that plays.
        store_keeper: of the agent's store, or None where it has none.
        lookahead: how far rollouts may run ahead; None where attempts and updates take turns.
        background_evaluation: evaluations on servers of their own; None has those of the rollouts play them.
        writer: of checkpoints that are written while training goes on.
        profiler: of some steps, or None where none are profiled.
        callbacks: of the program that trains.
        draw_seed: of the present stage's order of tasks, so that no two stages draw alike.
        state: where the run stands; replaced, never changed.
    """

    folder: Path
    seed: int
    policy: Policy
    runner: RolloutRunner
    publisher: Publisher
    metrics: Metrics
    record: RecordGroups
    evaluate: Callable[[str, bool], Awaitable[Any]]
    estimate: Callable[[Sequence[bool], Sequence[str]], Any]
    progress: Progress
    state: State
    demonstrations: Mapping[int, Any] = field(default_factory=dict)
    stage_environments: Mapping[int, StageEnvironment] = field(default_factory=dict)
    base_runner: RolloutRunner | None = None
    evaluates_before: bool = True
    store_keeper: StoreKeeper | None = None
    lookahead: Lookahead | None = None
    background_evaluation: BackgroundEvaluation | None = None
    writer: Writer = field(default_factory=Writer)
    profiler: Profiler | None = None
    callbacks: Callbacks = field(default_factory=lambda: Callbacks(()))
    draw_seed: int = 0
    _clock: float = field(default_factory=time.perf_counter)
    _saved: State | None = None
    _said: set[str] = field(default_factory=set)

    @property
    def checkpoints(self) -> Path:
        """Folder of all checkpoints."""
        return self.folder / "checkpoints"

    def reseed(self, step: int) -> None:
        """Make dropout and every other draw of torch a function of (process, seed, stage, step)."""
        found = current().rank
        for number in (self.seed, self.state.stage, step):
            found = found * 1_000_003 + number
        torch.manual_seed(found % 2**64)

    def profiled(self, step: int) -> AbstractContextManager[None]:
        """Profile `step` of the present stage, counted from 0, where that is wanted."""
        if self.profiler is None:
            return nullcontext()
        return self.profiler.at(self.state.stage, self.state.label, step, self.progress.say)

    async def publish(self, *, same_version: bool = False) -> None:
        """Hand the policy's weights to the engine, under a new version unless `same_version`."""
        self.policy.version += not same_version
        with span("delivery"):
            await self.publisher.publish()

    async def release_engine_memory(self) -> None:
        """Let the engine free GPU memory until its next call or delivery."""
        if isinstance(self.runner.engine, SleepableEngine):
            with span("delivery"):
                await self.runner.engine.sleep()

    @property
    def evaluation_runner(self) -> RolloutRunner:
        """The runner of evaluations: they are in the recipe's environment, whatever the stage has."""
        return self.base_runner or self.runner

    def replace_reward(self, name: str, reward: Any) -> None:
        """Score with `reward` under this name, from now on."""
        rewards = self.runner.rewards
        changed = {**rewards, name: replace(rewards[name], reward=reward)}
        self.runner = replace(self.runner, rewards=changed)

    def advance(self, **changes: Any) -> None:
        """Move the state on, the time since the last call included.

        Raises:
            CheckpointError: one that was being written meanwhile could not be.
        """
        self.writer.check()
        now = time.perf_counter()
        spent, self._clock = now - self._clock, now
        self.state = replace(
            self.state, train_s=self.state.train_s + spent, policy_version=self.policy.version, **changes
        )

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Leave the time spent inside out of the training time."""
        self.advance()
        try:
            yield
        finally:
            self._clock = time.perf_counter()

    def save(
        self,
        parts: LiveStage | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        in_background: bool = False,
    ) -> Path:
        """Write a checkpoint of the present state: a stage's live parts, or an optimiser alone.

        What is still being written is waited for. With `in_background` this one may be written when the call returns,
        if the stage says so. A state that is saved already, but for the time spent, is not saved again. Once a stage is
        finished its policy stays, and so does the rest of the checkpoint of its last step: only the state is written.
        """
        with span("checkpoint"):
            self.writer.wait()
            self.advance()
            locks.check(self.folder)
            folder, state = self.checkpoints / self.state.folder_name, replace(self.state, train_s=0.0)
            is_there = current().from_main(folder.is_dir(), f"whether {folder.name} is there")
            if parts is not None and state == self._saved and is_there:
                return folder
            kept, keep = (parts.kept, parts.stage.keep_checkpoints) if parts else ({}, store.KEPT)
            optimizer = parts.trainer.optimizer if parts else optimizer
            if parts is None and optimizer is None and self.state.finished and is_there:
                store.restate(self.checkpoints, self.state, self.metrics.marks())
                return folder
            later = parts is not None and in_background and parts.stage.checkpoint_in_background
            writer = self.writer if later else None
            beside = self.store_keeper.save if self.store_keeper else None
            store.save(
                self.checkpoints,
                self.state,
                self.policy,
                optimizer,
                kept,
                keep=keep,
                writer=writer,
                beside=beside,
                logs=self.metrics.marks(),
            )
            self._saved = state if parts is not None else None
            return folder

    def begin_stage(self, index: int, kind: str) -> None:
        """Reset the state to the first step of a stage."""
        self.state = replace(
            self.state,
            stage=index,
            stage_kind=kind,
            step=0,
            n_updates=0,
            n_critic_updates=0,
            kl_coef=None,
            watched=0,
            n_since_best=0,
            finished=False,
            of_steps=0,
        )

    def note_trainer(self, trainer: TorchTrainer) -> None:
        """Keep the configuration that DeepSpeed was given for this stage."""
        config = getattr(trainer, "config", None)
        if config is not None and current().is_main:
            (self.folder / f"deepspeed-{self.state.label}.json").write_text(json.dumps(config, indent=1))

    async def check_stop(self, save: Callable[[], Path] | None = None) -> None:
        """Between two updates: hear whether the user wants to stop. Several processes stop together or not at all.

        Args:
            save: writes a checkpoint of the updates so far, before a stop.
        """
        try:
            await asyncio.sleep(0)
            await self.callbacks.call(self.folder)
            if current().agree_to_stop():
                raise asyncio.CancelledError
        except asyncio.CancelledError as error:
            if save is None or (current().n > 1 and not current().stops_together):
                raise
            saved = save()
            raise self._interrupted(saved) from error
        except RlhfError:
            if save is not None and current().n == 1:
                save()
            raise

    def restore_stage(self, parts: LiveStage) -> None:
        """Give `parts` the state of the checkpoint; at the start of a stage, write that checkpoint."""
        self.note_trainer(parts.trainer)
        if self.state.step == 0:
            self.save(parts)
        else:
            parts.trainer.n_updates = self.state.n_updates
            folder = self.checkpoints / self.state.folder_name
            names = [name for name, p in self.policy.model.named_parameters() if p.requires_grad]
            unused = store.load_trainer(folder, parts.trainer.optimizer, parts.kept, names=names)
            if unused:
                raise CheckpointError(
                    "this checkpoint has the state of a part that this run lacks",
                    where=str(folder / "trainer.pt"),
                    got=", ".join(unused),
                    expected=", ".join(parts.kept),
                    hint=f"resume with the same hooks: rlhf.train(resume={str(self.folder)!r}, callbacks=[...])",
                )

    @contextmanager
    def saved_if_stopped(self, parts: LiveStage) -> Iterator[None]:
        """Save the last finished step when something stops what happens inside; a cancellation becomes Interrupted.

        Not saved is what does not belong together: a step whose updates were not all made, or were made and not logged.
        """
        try:
            yield
        except asyncio.CancelledError as error:
            last = self._save_whole(parts)
            raise self._interrupted(last) from error
        except (CheckpointError, ProcessError):  # nothing can be written
            raise
        except Exception as error:
            last = self._save_whole(parts)
            self.progress.say(f"the last checkpoint is {last}; to resume: {how_to_resume(self.folder)}")
            self.callbacks.raise_if_of_hook(error, f"step {self.state.step} of {self.state.label}")
            raise

    def _interrupted(self, saved: Path | None) -> Interrupted:
        what = f"stopped, and saved in {saved}" if saved else "stopped before anything was saved"
        return Interrupted(what, where=f"step {self.state.step}")

    def _save_whole(self, parts: LiveStage) -> Path | None:
        """Save unless a step is half done, or other processes are elsewhere; return the newest checkpoint."""
        self.writer.wait()
        if current().n > 1 and not current().stops_together:
            return store.latest(self.checkpoints)
        made = (parts.trainer.n_updates, parts.n_critic_updates)
        is_whole = made == (self.state.n_updates, self.state.n_critic_updates) and not parts.is_incomplete
        is_begun = self.state.step > 0  # before that, what the stage began with is all that a resumed run reads
        return self.save(parts) if is_whole and is_begun else store.latest(self.checkpoints)

    def caution(self, collected: RolloutBatch, where: str) -> None:
        """Warn the user of faults that the run survives, once for each kind."""
        self.warn_once(cautions(collected, self.runner.limits, where))

    def warn_once(self, texts: Mapping[str, str]) -> None:
        """Print each of `texts` unless one of its name was printed before."""
        for name, text in texts.items():
            if name not in self._said:
                self._said.add(name)
                self.progress.say(text)

    async def measure(self, name: str, *, full: bool = True) -> Any:
        """Evaluate, log, and keep the full results under `name`; returns what was found.

        Without rewards nothing says how good an attempt is: none is made, and the results are empty.
        """
        if not self.evaluation_runner.rewards:
            self.state = replace(self.state, results={**self.state.results, name: {}})
            return None
        with self.off_the_clock(), span("evaluation"):
            self.progress.note(f"evaluating ({name})")
            with explain_engine_out_of_memory(self.folder, f"evaluation ({name})"):
                result, version = await self.evaluate(name, full), self.policy.version
            self._take_in(name, result, self.state.step, version)
            if full:
                found = {**result.record, "version": version}
                self.state = replace(self.state, results={**self.state.results, name: found})
                self.progress.say(_result_line(name, result, version))
        return result

    def _take_in(self, name: str, result: Any, step: int, version: int) -> None:
        """Log an evaluation under the step and the version that it is of.

        Raises:
            DeliveryError: another version of the policy sampled in it.
        """
        if result.versions - {version}:
            raise DeliveryError(
                "an evaluation sampled from other weights than its own",
                where=f"evaluation ({name})",
                got=f"tokens by the versions {sorted(result.versions)}",
                expected=f"version {version}",
            )
        self.caution(result.collected, f"an evaluation ({name})")
        self._log(step, {**result.metrics, "eval/version": version})

    async def evaluate_if_due(self, every: int, n_steps: int) -> float | None:
        """Measure between two steps where that is due: after each `every` of `n_steps`, but for the last.

        The policy whose interval has the highest lower end so far is the best: few attempts make it low.

        Returns:
            the success; None where nothing was due.
        """
        step = self.state.step
        if step <= self.state.watched or not is_due(every, step, n_steps):
            return None
        found = await self.measure(f"step {step}", full=False)
        if found is None:
            text = "caution: no evaluation in this stage: the rewards of the recipe come from a later one"
            self.warn_once({"no rewards to evaluate with": text})
            self.advance(watched=step)
            return None
        self._watch(step, found.low)
        return float(found.success)

    def record_background_evaluation(self, begun: PendingEvaluation, ended: FinishedEvaluation) -> None:
        """Record a background evaluation, or say why it failed."""
        if ended.result is None:
            self.progress.say(f"no evaluation of step {begun.step}, version {begun.version}: {ended.fault}")
            self.advance(watched=begun.step)
            return
        name = f"step {begun.step}"
        self._take_in(name, ended.result, begun.step, begun.version)
        self.progress.say(_result_line(name, ended.result, begun.version))
        self._watch(begun.step, ended.result.low)

    def _watch(self, step: int, low: float) -> None:
        """Note that the policy after a step was evaluated, and the lower end of the interval of its success.

        A policy that the stage has not updated, as while a critic learns alone, is no worse than the best.
        """
        name = replace(self.state, step=step).folder_name
        is_best = not self.state.best or low > self.state.best_low
        n_since = 0 if is_best or not self.state.n_updates else self.state.n_since_best + 1
        best = {"best": name, "best_low": float(low)} if is_best else {}
        self.advance(watched=step, n_since_best=n_since, **best)

    def log(self, step: int, values: Mapping[str, float], *, delivered: bool = True) -> None:
        """Write one line of metrics for the present stage, with the step's delivery figures if any."""
        figures = self.publisher.figures if delivered else {}
        self._log(step, {**values, **figures, **used_memory()})

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        locks.check(self.folder)
        self.metrics.log(step, self.state.label, values)
        self.state = replace(self.state, n_logged=self.state.n_logged + 1)


def _result_line(name: str, result: Any, version: int) -> str:
    """Success and version of an evaluation."""
    n_tasks = sum(bool(group.trajectories) for group in result.collected.groups)
    tasks = f"{n_tasks} unseen tasks" if result.n <= n_tasks else f"{result.n} attempts at {n_tasks} unseen tasks"
    if result.n_errors:
        tasks += f" ({result.n_errors} of {result.n + result.n_errors} attempts failed and are left out)"
    return (
        f"{name}: success {result.success:.1%} on {tasks}, "
        f"95% interval {result.low:.1%} to {result.high:.1%}, version {version} of the policy"
    )


def used_memory() -> dict[str, float]:
    """Current and peak memory of the process, in 1e9 bytes; of a GPU, tensors only."""
    unit = 1 if sys.platform == "darwin" else 1024  # of `ru_maxrss`: macOS counts in bytes, Linux in kibibytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    found = {"memory/rss_gb": psutil.Process().memory_info().rss / 1e9, "memory/peak_gb": peak / 1e9}
    if torch.cuda.is_available():
        found["memory/gpu_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found
