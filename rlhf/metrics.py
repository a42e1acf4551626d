"""Every metric with its unit and meaning, and the places a run writes them to.

A name that is not in `METRICS` is an error, so that a curve cannot vanish through a misspelling. Names that end in
`/*` are families: `reward/*` admits `reward/format`. Units: `1` is a pure number, `share` lies in [0, 1].
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Protocol

from rlhf.errors import DataError, MissingPackageError, disk, nearest


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as it appears in a log line; ends in `/*` for a family.
        unit: unit of the value.
        meaning: one line for the reader of a curve.
    """

    name: str
    unit: str
    meaning: str


_TABLE = """
rollout/success                 | share      | episodes whose success criterion was met, failures of parts left out
rollout/return_mean             | 1          | mean total score of the episodes
rollout/return_std              | 1          | standard deviation of the total score over the episodes
rollout/n_episodes              | episodes   | attempts, those included that ended by the failure of a part
rollout/n_groups                | groups     | tasks attempted
rollout/n_generations           | calls      | calls of the policy
rollout/n_turns_mean            | turns      | mean turns of an episode
rollout/n_tokens                | tokens     | sampled tokens
rollout/n_prompt_tokens         | tokens     | prompt tokens given to the model, cached ones included
rollout/tokens_per_s            | tokens/s   | sampled tokens per second of rollout
rollout/time_s                  | s          | wall-clock time of the rollout
rollout/cached_share            | share      | prompt tokens whose keys and values were kept from an earlier call
rollout/engine_share            | share      | rollout time spent inside the model's forward pass
rollout/n_truncated_generations | calls      | generations cut by the limit on new tokens
rollout/n_invalid_actions       | turns      | turns whose action could not be read or was not understood
rollout/invalid_share           | share      | turns with an invalid action among all turns
rollout/n_failures              | attempts   | attempts that ended by the failure of a part, retries exhausted
rollout/error_share             | share      | attempts that ended by the failure of a part among all attempts
rollout/n_retries               | attempts   | attempts thrown away and repeated because a part failed
rollout/n_policy_versions       | versions   | different weights that sampled this step's tokens
rollout/n_solved                | episodes   | episodes that met the environment's success criterion
rollout/n_failed                | episodes   | episodes that the environment ended without success
rollout/n_turn_limit            | episodes   | episodes cut by the limit on turns
rollout/n_token_limit           | episodes   | episodes cut because the context was full
rollout/n_timeout               | attempts   | attempts that took longer than allowed
rollout/n_env_error             | attempts   | attempts that ended by a failure of the environment
rollout/n_agent_error           | attempts   | attempts that ended by a failure of the agent
rollout/n_engine_error          | attempts   | attempts that ended by a failure of the engine
rollout/n_reward_error          | attempts   | attempts that ended by a failure of a reward
reward/*                        | 1          | mean unweighted value of this reward
env/*                           | 1          | figure reported by the environment
custom/*                        | 1          | figure reported by a plugged-in part
credit/n_groups                 | groups     | groups credit was computed for
credit/n_single_groups          | groups     | groups of one trajectory: no baseline, no signal
credit/n_zero_std_groups        | groups     | groups whose trajectories all scored the same: no signal
credit/n_flat_steps             | steps      | steps whose tokens would all get the same number: no signal
credit/n_state_groups           | states     | environment states that several turns of a group started from
credit/n_state_singletons       | states     | environment states seen once: no state-level signal
credit/n_turns_without_state    | turns      | turns whose environment state is not known: no state-level signal
credit/n_turns_alone            | turns      | turns that no other trajectory has a counterpart of: no signal
credit/n_single_strata          | strata     | strata of one trajectory: compared with the whole group only
credit/n_small_advantages       | episodes   | trajectories whose advantage was too small to count
credit/n_task_types             | types      | types of task that were normalised on their own
credit/n_untimed_trajectories   | episodes   | trajectories whose seconds are not known: weight 1
credit/n_planning_tokens        | tokens     | sampled tokens taken for planning
credit/advantage_abs_mean       | 1          | mean absolute advantage of a sampled token
credit/advantage_std            | 1          | standard deviation of the advantage over the sampled tokens
batch/n_samples                 | rows       | rows given to the trainer
batch/n_tokens                  | tokens     | tokens in these rows, padding left out
batch/n_policy_tokens           | tokens     | tokens that are trained on
batch/n_rewritten_prompts       | prompts    | prompts that do not extend the one before: they begin a new row
batch/n_dropped_groups          | groups     | groups left out because nothing can be learned from them
batch/n_dropped_trajectories    | episodes   | trajectories left out because a limit cut them
batch/n_low_entropy_tokens      | tokens     | sampled tokens left out because the policy was sure of them
batch/n_outliers                | episodes   | trajectories left out because their advantage is far from the others'
batch/n_trajectories_without_tokens | episodes | trajectories in which the policy sampled nothing
batch/n_microbatches            | batches    | forward and backward passes
batch/padding_share             | share      | computed tokens that are padding
loss/total                      | 1          | the number that is minimised
loss/policy                     | 1          | policy-gradient term
loss/kl_ref                     | nats       | divergence from the frozen reference per token
loss/kl_coef                    | 1          | coefficient of that divergence in the next step, where it is adapted
loss/entropy                    | nats       | entropy of the policy's next-token distribution
loss/clip_high_share            | share      | tokens whose ratio was clipped from above
loss/clip_low_share             | share      | tokens whose ratio was clipped from below
loss/clip_dual_share            | share      | tokens at the bound for negative advantages
loss/approx_kl                  | nats       | divergence from the policy that made the trajectories, k3
loss/ratio_mean                 | 1          | mean ratio of new to old probability
loss/ratio_max                  | 1          | largest ratio of new to old probability
loss/sampler_gap_mean           | nats       | mean absolute difference of the trainer's and the engine's log-probs
loss/sampler_gap_max            | nats       | largest absolute difference of the trainer's and the engine's log-probs
loss/sampler_kl_k1              | nats       | divergence of the trainer's policy from the engine's, k1; may be negative
loss/sampler_kl_k3              | nats       | divergence of the trainer's policy from the engine's, k3
loss/sampler_ess                | share      | effective sample size of the weights for that difference, per token
loss/sampler_weight_mean        | 1          | mean weight for that difference of a token that is kept
loss/sampler_bounded_share      | share      | tokens whose weight was brought to a bound
loss/sampler_masked_share       | share      | tokens of weight 0 that still count in the denominators
loss/sampler_rejected_share     | share      | tokens left out, denominators included, by rejection or veto
loss/sampler_dropped_share      | share      | trajectories of which rejection or veto left nothing
delivery/canary_gap             | nats       | largest difference of engine and trainer on the canary, after a delivery
delivery/canary_moved           | nats       | how far the canary moved in the trainer since the last delivery
optimizer/lr                    | 1          | learning rate of the last update
optimizer/grad_norm             | 1          | norm of the gradient before clipping
optimizer/n_updates             | updates    | parameter updates
optimizer/n_skipped             | updates    | updates left out because the gradient was not finite
supervised/loss                 | nats       | cross-entropy per demonstrated token
supervised/accuracy             | share      | demonstrated tokens that are the policy's likeliest
supervised/n_tokens             | tokens     | demonstrated tokens trained on
supervised/n_demonstrations     | episodes   | demonstrations trained on
eval/success                    | share      | evaluation episodes whose success criterion was met
eval/success_low                | share      | lower end of the 95% interval of eval/success
eval/success_high               | share      | upper end of the 95% interval of eval/success
eval/n_episodes                 | episodes   | evaluation episodes, failures of parts left out
eval/n_errors                   | attempts   | evaluation attempts that ended by the failure of a part
eval/return_mean                | 1          | mean total score of the evaluation episodes
eval/n_turns_mean               | turns      | mean turns of an evaluation episode
time/rollout_s                  | s          | making trajectories and scoring them
time/train_s                    | s          | computing the loss and updating
time/eval_s                     | s          | evaluating
time/checkpoint_s               | s          | writing checkpoints
time/publish_s                  | s          | giving new weights to the engine
time/step_s                     | s          | the whole step
memory/rss_gb                   | GB         | resident memory of the process, 1e9 bytes
memory/peak_gb                  | GB         | highest resident memory of the process so far, 1e9 bytes
"""


def _parse(table: str) -> Mapping[str, Metric]:
    rows = (tuple(cell.strip() for cell in line.split("|", 2)) for line in table.strip().splitlines())
    return MappingProxyType({name: Metric(name, unit, meaning) for name, unit, meaning in rows})


#: Every metric by its name.
METRICS: Mapping[str, Metric] = _parse(_TABLE)
_FAMILIES = tuple(name[:-1] for name in METRICS if name.endswith("/*"))


def describe(name: str) -> Metric:
    """Return the metric of that name, or the family that admits it.

    Raises:
        DataError: no such metric.
    """
    if name in METRICS and not name.endswith("/*"):
        return METRICS[name]
    for prefix in _FAMILIES:
        if name.startswith(prefix) and len(name) > len(prefix) and name != prefix + "*":
            return METRICS[prefix + "*"]
    raise DataError(
        "no such metric",
        where="metrics",
        got=repr(name),
        expected="a name of rlhf.metrics.METRICS, or custom/<name>",
        hint=nearest(name, METRICS),
    )


@dataclass(frozen=True, slots=True)
class LogLine:
    """What was logged in one call.

    Attributes:
        step: optimiser step, counted as the caller counts.
        stage: stage of the recipe.
        time: seconds since 1970.
        values: by name; None stands for a value that was not finite.
    """

    step: int
    stage: str
    time: float
    values: Mapping[str, float | None]


class Sink(Protocol):
    """A place that log lines go to."""

    def write(self, line: LogLine) -> None:
        """Keep one line. Raises CheckpointError when it cannot."""
        ...

    def rewind(self, stage: str, step: int, n_lines: int | None = None) -> None:
        """Forget what was logged after that step of that stage, and after so many lines where that is given."""
        ...

    def close(self) -> None:
        """Flush and free."""
        ...


@dataclass(frozen=True)
class Metrics:
    """Checks names and passes each line to every sink.

    Attributes:
        sinks: where lines go; none is fine.
    """

    sinks: Sequence[Sink] = field(default_factory=tuple)

    def log(self, step: int, stage: str, values: Mapping[str, Any]) -> None:
        """Log `values` (numbers, or arrays of one number) at `step`.

        Raises:
            DataError: an unknown name, or a value that is no number.
            CheckpointError: a sink cannot be written.
        """
        line = LogLine(step, stage, time.time(), {name: _number(name, value) for name, value in values.items()})
        for sink in self.sinks:
            sink.write(line)

    def rewind(self, stage: str, step: int, n_lines: int | None = None) -> None:
        """Forget what was logged after `step` of `stage`, later stages included, so that a resumed run has no doubles.

        An empty `stage` forgets everything. `n_lines` is the number of lines to keep at most, which also tells lines of
        one step apart.
        """
        for sink in self.sinks:
            sink.rewind(stage, step, n_lines)

    def close(self) -> None:
        """Close every sink."""
        for sink in self.sinks:
            sink.close()


def _number(name: str, value: Any) -> float | None:
    describe(name)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several numbers
        raise DataError("a metric is no number", where=name, got=repr(value)[:80], expected="a float") from error
    return number if math.isfinite(number) else None


class JsonlSink:
    """Appends one JSON object per line: `{"step": 3, "stage": "policy_gradient", "time": ..., "rollout/success": 0.5}`.

    Each line is flushed. A line torn by a killed process is dropped when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        with disk("metrics", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _drop_torn_line(self.path)
            self._file: IO[str] = self.path.open("a", encoding="utf-8")

    def write(self, line: LogLine) -> None:
        """Append and flush one line."""
        record = {"step": line.step, "stage": line.stage, "time": round(line.time, 3), **line.values}
        with disk("metrics", self.path):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def rewind(self, stage: str, step: int, n_lines: int | None = None) -> None:
        """Drop the lines behind the last one of `stage` up to `step`; where the stage has none, all from its first."""
        self.close()
        n_kept = _n_kept(read_metrics(self.path), stage, step)
        n_kept = n_kept if n_lines is None else min(n_kept, n_lines)
        temporary = self.path.with_name(self.path.name + ".tmp")
        with disk("metrics", self.path):
            texts = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            temporary.write_text("".join(texts[:n_kept]), "utf-8")
            os.replace(temporary, self.path)
            self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        with disk("metrics", self.path):
            self._file.close()


def _n_kept(lines: Sequence[LogLine], stage: str, step: int) -> int:
    if not stage:
        return 0
    reached = [i for i, line in enumerate(lines) if line.stage == stage and line.step <= step]
    if reached:
        return reached[-1] + 1
    return next((i for i, line in enumerate(lines) if line.stage == stage), len(lines))


def _drop_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("rb+") as file:
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)


def read_metrics(path: Path) -> list[LogLine]:
    """Read the lines of a `metrics.jsonl`, oldest first; a torn last line is left out.

    Raises:
        DataError: a line in the middle is no log line.
    """
    text = Path(path).read_text(encoding="utf-8")
    return list(_log_lines(text[: text.rfind("\n") + 1].splitlines(), path))


def _log_lines(texts: Iterable[str], path: Path) -> Iterator[LogLine]:
    for number, text in enumerate(texts, start=1):
        try:
            record = json.loads(text)
            step, stage, at = int(record.pop("step")), str(record.pop("stage")), float(record.pop("time"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError("not a log line", where=f"{path}:{number}", got=text[:80]) from error
        yield LogLine(step, stage, at, record)


class TensorboardSink:
    """Writes event files for TensorBoard, one folder per stage, so that stages show as runs beside each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._writers: dict[str, Any] = {}

    def write(self, line: LogLine) -> None:
        """Write one scalar per finite value."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=v) for name, v in line.values.items() if v is not None]
        event = Event(wall_time=line.time, step=line.step, summary=Summary(value=values))
        with disk("metrics", self.folder):
            self._writer(line.stage).add_event(event)

    def rewind(self, stage: str, step: int, n_lines: int | None = None) -> None:
        """Tell TensorBoard to forget points of `stage` after `step`; the event of a session's start has that effect.

        Event files are only appended to: points of other stages stay, and are drawn over.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        for name in [stage] if stage else [p.name for p in self.folder.glob("*") if p.is_dir()]:
            start = Event(wall_time=time.time(), step=step + 1, session_log=SessionLog(status=SessionLog.START))
            with disk("metrics", self.folder):
                self._writer(name).add_event(start)

    def close(self) -> None:
        """Flush and close every event file."""
        with disk("metrics", self.folder):
            for writer in self._writers.values():
                writer.close()
        self._writers.clear()

    def _writer(self, stage: str) -> Any:
        if stage not in self._writers:
            try:
                from tensorboard.summary.writer.event_file_writer import EventFileWriter
            except ImportError as error:
                raise MissingPackageError(
                    "TensorBoard is not installed", where="metrics", hint="pip install tensorboard"
                ) from error
            with disk("metrics", self.folder):
                self._writers[stage] = EventFileWriter(str(self.folder / stage))
        return self._writers[stage]
