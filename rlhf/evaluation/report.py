"""The report of a run: one self-contained HTML page, made from the run folder's files alone.

It answers, in this order: did it learn (success before and after on unseen tasks, with intervals), can the figure be
trusted (the gap between trainer and engine first), how did it go (curves), what does the agent do (trajectories), and
what exactly was run.
"""

from __future__ import annotations

from pathlib import Path

from rlhf.evaluation import transcript
from rlhf.evaluation.contrib.findings import compared, findings
from rlhf.evaluation.curves import learning_curves
from rlhf.evaluation.figures import interval_chart
from rlhf.evaluation.page import failures, render, write_page
from rlhf.evaluation.run_data import RunData
from rlhf.evaluation.store import TrajectoryRecord
from rlhf.evaluation.wording import duration_text, number_text
from rlhf.metrics import describe


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into a run folder; returns its path. A run that was stopped early has a report too.

    Raises:
        CheckpointError: the folder holds no run, or the page cannot be written.
        DataError: a file of the run is damaged.
    """
    folder = Path(run_folder)
    return write_page(folder, render_report(RunData.read(folder)))


def render_report(run: RunData) -> str:
    """Return the page's HTML."""
    points, trajectories, found = list(run.results.items()), run.folder / "trajectories", findings(run)
    rows = [(name, p["success"], p["low"], p["high"]) for name, p in points]
    picked = transcript.choose(trajectories)
    tokenizer = transcript.load_tokenizer(run.folder) if picked else None
    scale = max((abs(a) for _, r in picked for row in r.advantages or () for a in row), default=0.0)
    return render(
        "run",
        title=f"Run {run.name}",
        subtitle=_subtitle(run),
        run=run,
        points=[p for _, p in points],
        compared=compared(run) if points else None,
        n_errors=sum(int(p.get("n_errors") or 0) for _, p in points),
        chart=interval_chart(rows, "Success on unseen tasks", standalone=False) if points else "",
        # The gap between trainer and engine leads, whatever it is; then what is wrong.
        findings=[*found[:1], *sorted(found[1:], key=lambda f: ("problem", "look", "fine").index(f.level))],
        failures=failures(trajectories),
        curves=learning_curves(run),
        scale=scale,
        shown=[(caption, _words_of(r), transcript.transcript(r, tokenizer, scale)) for caption, r in picked],
        times=_times(run),
        metrics=_all_metrics(run),
    )


def _subtitle(run: RunData) -> str:
    parts = []
    if kind := run.setting("environment.kind"):
        parts.append(str(kind))
    if steps := [c for c in run.curves("rollout/success") if c.steps]:
        parts.append(f"{sum(len(c.steps) for c in steps)} steps")
    if episodes := sum(run.values("rollout/n_episodes")):
        parts.append(f"{episodes:,.0f} training episodes")
    if seconds := _duration(run):
        parts.append(duration_text(seconds))
    if (seed := run.setting("seed")) is not None:
        parts.append(f"seed {seed}")
    return " · ".join(parts)


def _duration(run: RunData) -> float:
    return run.lines[-1].time - run.lines[0].time if run.lines else 0.0


def _words_of(record: TrajectoryRecord) -> str:
    t = record.trajectory
    words = [record.task_id, f"{len(t.turns)} turns", f"{t.n_tokens} sampled tokens"]
    if record.score is not None:
        parts, watched = (
            ", ".join(f"{name} {number_text(v.value)}" for name, v in verdicts.items())
            for verdicts in (record.score.parts, record.score.watched)
        )
        words.append(f"score {number_text(record.score.total)}" + (f" ({parts})" if parts else ""))
        words += [f"watched {watched}"] if watched else []
    if versions := sorted({v for g in t.generations for v in g.versions}):
        words.append(f"policy version {', '.join(map(str, versions))}")
    if record.advantages is None:
        words.append("no advantages in evaluation")
    return " · ".join(words)


def _times(run: RunData) -> list[tuple[str, str]]:
    names = ("time/rollout_s", "time/train_s", "time/eval_s", "time/publish_s")
    rows = [(describe(name).meaning, f"{sum(values):.1f} s") for name in names if (values := run.values(name))]
    if peak := run.values("memory/rss_gb"):
        rows.append(("resident memory, most at any step", f"{max(peak):.2f} GB"))
    return rows


def _all_metrics(run: RunData) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name in sorted({name for line in run.lines for name in line.values}):
        metric = describe(name)
        if values := run.values(name):
            rows.append((name, number_text(values[0]), number_text(values[-1]), metric.unit, metric.meaning))
    return rows
