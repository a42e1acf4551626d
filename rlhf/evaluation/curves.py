"""The learning curves of a report: which metrics, over which steps, with which intervals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlhf.evaluation.contrib.reliability import reliability_charts
from rlhf.evaluation.figures import Band, Series, line_chart, smooth
from rlhf.evaluation.run_data import Curve, RunData
from rlhf.metrics import describe

#: Most characters that have room over a chart of 400 pixels, with a unit behind them.
_LONGEST = 58


@dataclass(frozen=True, slots=True)
class Chart:
    """Metrics of one chart, with the legend's word for each."""

    title: str
    metrics: tuple[tuple[str, str], ...]


CHARTS = (
    Chart("Return", (("rollout/return_mean", "return"),)),
    Chart(
        "Difference of trainer and engine",
        (("loss/sampler_gap_mean", "mean"), ("loss/sampler_gap_max", "largest"), ("loss/sampler_kl_k3", "divergence")),
    ),
    Chart(
        "Weights for trainer and engine",
        (
            ("loss/sampler_ess", "effective sample size"),
            ("loss/sampler_bounded_share", "at a bound"),
            ("loss/sampler_masked_share", "masked"),
            ("loss/sampler_rejected_share", "rejected"),
        ),
    ),
    Chart("Entropy", (("loss/entropy", "entropy"),)),
    Chart("Divergence", (("loss/approx_kl", "from sampling policy"), ("loss/kl_ref", "from reference"))),
    Chart("Invalid actions", (("rollout/invalid_share", "invalid"),)),
    Chart("Length of an episode", (("rollout/n_turns_mean", "turns"),)),
    Chart("Gradient", (("optimizer/grad_norm", "gradient norm"),)),
    Chart("Speed of the rollout", (("rollout/tokens_per_s", "tokens per second"),)),
    Chart("Imitation of demonstrations", (("supervised/loss", "loss"),)),
)


def learning_curves(run: RunData) -> list[str]:
    """Return the charts: success first, then whatever else the run logged."""
    return [
        *_success(run),
        *_watched(run),
        *(svg for chart in CHARTS for svg in _chart(run, chart)),
        *reliability_charts(run.folder),
    ]


def _success(run: RunData) -> Iterator[str]:
    series: list[Series] = []
    bands: list[Band] = []
    training = run.curves("rollout/success")
    for curve in training:
        series += _smoothed(curve, _label("training episodes", curve, training))
    evaluated = [c for c in run.curves("eval/success") if not training or c.stage in {t.stage for t in training}]
    for curve in evaluated:
        label = _label("unseen tasks, 95% interval", curve, evaluated)
        series.append(Series(label, curve.steps, curve.values, "points"))
        ends = [{c.stage: c for c in run.curves(f"eval/success_{end}")}.get(curve.stage) for end in ("low", "high")]
        if all(end is not None and len(end.steps) == len(curve.steps) for end in ends):
            low, high = ([v if v is not None else 0.0 for v in end.values] for end in ends if end is not None)
            bands.append(Band(label, curve.steps, low, high))
    if series:
        yield line_chart(
            series,
            "Success",
            "training step",
            "share of the episodes that met the environment's criterion",
            bands,
            percent=True,
            y_range=(0.0, 1.0),
            width=1120,
            height=340,
            standalone=False,
        )


def _watched(run: RunData) -> Iterator[str]:
    """A chart for each reward that is watched, beside what is trained on."""
    for name in run.names("watch/"):
        series: list[Series] = []
        curves, gaps = run.curves(f"watch/{name}"), {c.stage: c for c in run.curves(f"watch_gap/{name}")}
        for curve in curves:
            gap = gaps[curve.stage]
            sums = [None if x is None or y is None else x + y for x, y in zip(curve.values, gap.values, strict=True)]
            trained = Curve(curve.stage, curve.steps, sums)
            series += _smoothed(trained, _label("trained on", curve, curves))
            series += _smoothed(curve, _label("watched", curve, curves))
        title = f"Watched reward {name}"
        yield line_chart(series, title, "step", "mean over attempts", width=400, height=236, standalone=False)


def _chart(run: RunData, chart: Chart) -> Iterator[str]:
    series: list[Series] = []
    shown = [(describe(name), label) for name, label in chart.metrics if run.values(name)]
    for metric, label in shown:
        curves = run.curves(metric.name)
        for curve in curves:
            # The heading names a metric that is alone.
            words = curve.stage if len(shown) == 1 and len(curves) > 1 else _label(label, curve, curves)
            series += _smoothed(curve, words)
    if not shown:
        return
    metric = shown[0][0]
    unit = metric.unit if metric.unit not in ("share", "1") else ""
    y_label = unit if len(shown) > 1 else ", ".join(filter(None, (_brief(metric.meaning, shown[0][1]), unit)))
    percent = metric.unit == "share"
    yield line_chart(series, chart.title, "step", y_label, percent=percent, width=400, height=236, standalone=False)


def _brief(meaning: str, words: str) -> str:
    """The meaning of a metric where it fits over a chart, else the legend's words."""
    return meaning if len(meaning) <= _LONGEST else words


def _smoothed(curve: Curve, label: str) -> list[Series]:
    """Return the curve, and where it is long a faint one behind its moving mean."""
    window = max(1, len(curve.steps) // 15) // 2 * 2 + 1
    if window < 3:
        return [Series(label, curve.steps, curve.values)]
    raw = Series(label, curve.steps, curve.values, "faint")
    return [raw, Series(label, curve.steps, smooth(curve.values, window))]


def _label(words: str, curve: Curve, among: list[Curve]) -> str:
    return words if len(among) == 1 else f"{words} ({curve.stage})"
