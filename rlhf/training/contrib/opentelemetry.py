"""OpenTelemetry spans of episodes, their turns and the steps of training.

    trackers:
      - {kind: opentelemetry, endpoint: "http://localhost:4318/v1/traces"}

An episode is a span `invoke_agent` with a span for each turn, in which each call of a tool has a span `execute_tool`,
by the names of the conventions for generative AI where they have one. Calls of one turn are not timed one by one: each
has the time of its turn. Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, TextIO

from pydantic.dataclasses import dataclass

from agents.tool_calls import ToolCall, Unreadable, read_calls
from rlhf.checking import CheckContext
from rlhf.data import Turn
from rlhf.rollout.telemetry import EndedEpisode, listen
from rlhf.settings import STRICT
from rlhf.sinks import LogLine
from rlhf.training.trackers import LiveRun, TrackedRun

#: Name of the file that spans are written to where there is no collector.
SPANS = "spans.jsonl"
_NS = 1_000_000_000
#: Spans that wait for a slow collector before any is lost: those of 3,000 episodes of 20 turns.
_QUEUE = 1 << 16


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OpenTelemetry:
    """OpenTelemetry spans of episodes and steps, to a collector or a file."""

    #: What it needs, and the name of its extra.
    package: ClassVar[str] = "opentelemetry.sdk"
    #: The first episodes come before the first line.
    begins_early: ClassVar[bool] = True

    endpoint: str | None = None
    """Address of a collector for OTLP over HTTP; null writes `spans.jsonl` into the run's folder."""
    with_text: bool = False
    """Put the texts of actions and replies into spans of turns and tools."""

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Caution where attempts are made in processes that this one does not hear of."""
        if context.recipe.cluster.is_on:
            yield f"{context.path} has spans of steps and evaluations only: rollout workers make the attempts"

    def begin(self, run: TrackedRun) -> LiveRun:
        """Begin to hear of episodes."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(
            resource=Resource.create({"service.name": "rlhf", "rlhf.run": run.name, "rlhf.run.id": run.id})
        )
        file = None if self.endpoint is not None else (run.folder / SPANS).open("a", encoding="utf-8")
        provider.add_span_processor(BatchSpanProcessor(_exporter(self.endpoint, file), max_queue_size=_QUEUE))
        return _Spans(provider, self.with_text, file)


def _exporter(endpoint: str | None, file: TextIO | None) -> Any:
    if file is None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint)
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    return ConsoleSpanExporter(out=file, formatter=lambda span: str(span.to_json(indent=None)) + "\n")


class _Spans:
    """Writes a span for each episode and each line of a run."""

    def __init__(self, provider: Any, with_text: bool, file: TextIO | None) -> None:
        self._provider, self._with_text, self._file = provider, with_text, file
        self._tracer = provider.get_tracer("rlhf")
        self._leave = listen(self._episode)

    def write(self, line: LogLine) -> None:
        seconds = line.values.get("time/step_s") or 0.0
        named = {name: value for name, value in line.values.items() if value is not None}
        span = self._span(
            "step", line.time - seconds, None, {"rlhf.stage": line.stage, "rlhf.step": line.step, **named}
        )
        span.end(int(line.time * _NS))

    def end(self) -> None:
        self._leave()
        self._provider.shutdown()
        if self._file is not None:
            self._file.close()

    def _episode(self, episode: EndedEpisode) -> None:
        t = episode.trajectory
        told = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.conversation.id": episode.session,
            "gen_ai.usage.input_tokens": sum(g.prompt.n_tokens for g in t.generations),
            "gen_ai.usage.output_tokens": t.n_tokens,
            "rlhf.task": t.task_id,
            "rlhf.attempt": t.attempt,
            "rlhf.outcome": str(t.outcome),
            "rlhf.policy_versions": sorted({v for g in t.generations for v in g.versions}),
        }
        span = self._span("invoke_agent", episode.begun, None, told)
        if t.outcome.is_infrastructure_error:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, t.detail))
        at = episode.begun + episode.prepared_s
        for k, turn in enumerate(t.turns):
            child, begun = self._span(f"turn {k + 1}", at, span, self._of_turn(turn, k)), at
            at += turn.duration_s if k >= max(t.n_given, t.n_shared) else 0.0
            for call in _calls(turn):
                self._span(f"execute_tool {call.name}", begun, child, self._of_call(call)).end(int(at * _NS))
            child.end(int(at * _NS))
        span.end(int((episode.begun + t.duration_s) * _NS))

    def _of_turn(self, turn: Turn, k: int) -> dict[str, Any]:
        told = {
            "rlhf.turn": k + 1,
            "rlhf.reward": turn.reward,
            "rlhf.valid": turn.valid,
            "gen_ai.usage.output_tokens": sum(g.n_tokens for g in turn.generations),
        }
        return told | ({"rlhf.action": turn.action.text, "rlhf.reply": turn.reply} if self._with_text else {})

    def _of_call(self, call: ToolCall) -> dict[str, Any]:
        told = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": call.name}
        return told | ({"gen_ai.tool.call.arguments": call.json_arguments} if self._with_text else {})

    def _span(self, name: str, begun: float, parent: Any, attributes: dict[str, Any]) -> Any:
        from opentelemetry.trace import set_span_in_context

        context = None if parent is None else set_span_in_context(parent)
        return self._tracer.start_span(name, context=context, start_time=int(begun * _NS), attributes=attributes)


def _calls(turn: Turn) -> Iterator[ToolCall]:
    """The calls of tools among what the environment was given in a turn."""
    for step in turn.action.steps if turn.action.error is None else ():
        try:
            yield from read_calls(step, "json") if step.startswith("{") else ()
        except Unreadable:
            continue  # an action of another kind that begins with a brace
