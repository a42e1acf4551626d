"""Experiment trackers that a run's metrics go to besides its own files: Weights & Biases, MLflow, Trackio, SwanLab.

    trackers:
      - {kind: wandb, project: my-project, mode: offline}

A tracker only watches. Where it raises, the run says so once and goes on without it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic.dataclasses import dataclass

from rlhf.capabilities import Capability, CapabilityView
from rlhf.settings import STRICT
from rlhf.sinks import LogLine

_FILE = "tracker_id"
#: MLflow's limits.
_LONGEST_PARAM, _PARAMS_AT_ONCE = 500, 100


@plain_dataclass(frozen=True)
class TrackedRun:
    """Description of a run for a tracker.

    Attributes:
        name: of the run.
        folder: of the run.
        config: the recipe as plain values.
        id: the same when the run goes on.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    id: str


class LiveRun(Protocol):
    """A run as its tracker has it, from `begin` to `end`."""

    def write(self, line: LogLine) -> object:
        """Send a line."""

    def end(self) -> object:
        """Finish the tracked run. An optional method `fail` does so after a run that failed or was stopped."""


@runtime_checkable
class Tracker(Protocol):
    """Settings of a place that metrics are sent to."""

    def begin(self, run: TrackedRun) -> LiveRun:
        """Connect: begin the run, or go on with it."""


class TrackerCapabilities(CapabilityView):
    """Optional attributes of a tracker."""

    package = Capability("", str)
    """Module that it needs; its first name is the name of its extra."""
    begins_early = Capability(False, bool)
    """True if it begins with the run, not with the first line."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Wandb:
    """Weights & Biases; each stage has a step of its own, `STAGE/step`."""

    #: What it needs, and the name of its extra.
    package: ClassVar[str] = "wandb"

    project: str = "rlhf-agents"
    """Project of the run."""
    entity: str | None = None
    """User or team; null is the one that is logged in."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes into the run's folder, for `wandb sync` later."""

    def begin(self, run: TrackedRun) -> LiveRun:
        """Begin the run, or go on with it."""
        import wandb

        return _WandbRun(
            wandb.init(
                project=self.project,
                entity=self.entity,
                name=run.name,
                id=run.id,
                resume="allow",
                dir=str(run.folder),
                mode=self.mode,
                config=dict(run.config),
            )
        )


@plain_dataclass(frozen=True)
class _Logged:
    """Lines of a run as dictionaries, each with the step of its stage."""

    run: Any

    def write(self, line: LogLine) -> None:
        self.run.log({f"{line.stage}/step": line.step, **_named(line)})

    def end(self) -> None:
        self.run.finish()


@plain_dataclass(frozen=True)
class _WandbRun(_Logged):
    """The same as wandb's history, with an axis for each stage."""

    stages: set[str] = field(default_factory=set)

    def write(self, line: LogLine) -> None:
        if line.stage not in self.stages:
            self.stages.add(line.stage)
            self.run.define_metric(f"{line.stage}/*", step_metric=f"{line.stage}/step")
        super().write(line)

    def fail(self) -> None:
        self.run.finish(exit_code=1)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MLflow:
    """MLflow, by a tracking server or a local database."""

    #: What it needs, and the name of its extra.
    package: ClassVar[str] = "mlflow"

    experiment: str = "rlhf-agents"
    """Experiment of the run."""
    tracking_uri: str | None = None
    """Address of a server, or `sqlite:///FILE`; null is mlflow.db in the run's folder."""

    def begin(self, run: TrackedRun) -> LiveRun:
        """Begin the run, or go on with it."""
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self.tracking_uri or f"sqlite:///{(run.folder / 'mlflow.db').resolve()}")
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else client.create_experiment(self.experiment)
        runs = client.search_runs([experiment], f"tags.rlhf_id = '{run.id}'")
        live = runs[0] if runs else client.create_run(experiment, run_name=run.name, tags={"rlhf_id": run.id})
        if runs:
            client.update_run(live.info.run_id, status="RUNNING")
        else:
            with suppress(Exception):  # MLflow refuses some names, and metrics come all the same
                _log_config(client, live.info.run_id, run.config)
        return _MLflowRun(client, live.info.run_id)


def _log_config(client: Any, run_id: str, config: Mapping[str, Any]) -> None:
    """Log a recipe as parameters of MLflow, by their paths."""
    from mlflow.entities import Param

    found = [Param(path, str(value)[:_LONGEST_PARAM]) for path, value in _flat(config)]
    for begin in range(0, len(found), _PARAMS_AT_ONCE):
        client.log_batch(run_id, params=found[begin : begin + _PARAMS_AT_ONCE])


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of each leaf, as `stages.0.kind`."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in items:
        yield from _flat(inner, f"{path}.{key}".lstrip("."))
    if path and not items:
        yield path, value


@plain_dataclass(frozen=True)
class _MLflowRun:
    """Lines of a run as batches of MLflow's metrics."""

    client: Any
    run_id: str

    def write(self, line: LogLine) -> None:
        from mlflow.entities import Metric

        at = int(line.time * 1000)
        self.client.log_batch(self.run_id, [Metric(name, v, at, line.step) for name, v in _named(line).items()])

    def end(self) -> None:
        self.client.set_terminated(self.run_id)

    def fail(self) -> None:
        self.client.set_terminated(self.run_id, "FAILED")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Trackio:
    """Trackio, by a local database; `trackio show` draws it."""

    #: What it needs, and the name of its extra.
    package: ClassVar[str] = "trackio"

    project: str = "rlhf-agents"
    """Project of the run."""
    space_id: str | None = None
    """Space on a hub that shows it; null keeps it here."""

    def begin(self, run: TrackedRun) -> LiveRun:
        """Begin the run, or go on with it."""
        import trackio

        live = trackio.init(
            self.project, name=f"{run.name}-{run.id[:6]}", space_id=self.space_id, config=dict(run.config),
            resume="allow", embed=False,
        )  # fmt: skip
        return _Logged(live)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SwanLab:
    """SwanLab, online or in the run's folder."""

    #: What it needs, and the name of its extra.
    package: ClassVar[str] = "swanlab"

    project: str = "rlhf-agents"
    """Project of the run."""
    workspace: str | None = None
    """User or organisation; null is the one that is logged in."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes into the run's folder, for `swanlab sync` later; a run that goes on begins another record."""

    def begin(self, run: TrackedRun) -> LiveRun:
        """Begin the run; online, or go on with it."""
        import swanlab

        resumed = {"id": run.id, "resume": "allow"} if self.mode == "online" else {}
        live = swanlab.init(
            project=self.project, workspace=self.workspace, name=run.name, mode=self.mode,
            log_dir=str(run.folder / "swanlab"), config=dict(run.config), **resumed,
        )  # fmt: skip
        return _Logged(live)


@plain_dataclass
class TrackerSink:
    """A tracker as a sink; after a failure it warns once and stops.

    What a resumed run logs again is there twice: trackers cannot forget.
    """

    tracker: Tracker
    run: TrackedRun
    say: Callable[[str], object]
    _live: LiveRun | None = None
    _has_failed: bool = field(default=False)

    def __post_init__(self) -> None:
        """Connect where the tracker does not wait for the first line."""
        if TrackerCapabilities(self.tracker).begins_early:
            self._guarded(self._begun)

    def write(self, line: LogLine) -> None:
        """Send a line; connect before the first."""
        self._guarded(lambda: self._begun().write(line))

    def rewind(self, stage: str, step: int, n_lines: int | None = None) -> None:
        """A tracker keeps what it has."""

    def close(self) -> None:
        """Send what is left."""
        self._end(has_failed=False)

    def fail(self) -> None:
        """Finish the tracked run, marked as failed."""
        self._end(has_failed=True)

    def _end(self, *, has_failed: bool) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        end = getattr(live, "fail", live.end) if has_failed else live.end
        if self._has_failed:  # it may end all the same
            with suppress(Exception):
                end()
        self._guarded(end)

    def _begun(self) -> LiveRun:
        if self._live is None:
            self._live = self.tracker.begin(self.run)
        return self._live

    def _guarded(self, call: Callable[[], object]) -> None:
        if self._has_failed:
            return
        try:
            call()
        except Exception as error:
            self._has_failed = True
            name = type(self.tracker).__name__
            self.say(
                f"caution: the tracker {name} failed, and the run continues without it: {type(error).__name__}: {error}"
            )


def sinks_of(
    trackers: tuple[Tracker, ...], name: str, folder: Path, config: Mapping[str, Any], say: Callable[[str], object]
) -> list[TrackerSink]:
    """Return a sink for each tracker of a recipe."""
    if not trackers:
        return []
    path = folder / _FILE
    if not path.is_file():
        path.write_text(uuid.uuid4().hex[:16], "utf-8")
    run = TrackedRun(name, folder, config, path.read_text("utf-8"))
    return [TrackerSink(tracker, run, say) for tracker in trackers]


def _named(line: LogLine) -> dict[str, float]:
    return {f"{line.stage}/{name}": value for name, value in line.values.items() if value is not None}
