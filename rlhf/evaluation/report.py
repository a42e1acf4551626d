"""The report of a run: one self-contained HTML page, made from the run folder's files alone.

It answers, in this order: did it learn (success before and after on unseen tasks, with intervals), can the figure be
trusted (the gap between trainer and engine first), how did it go (curves), what does the agent do (trajectories), and
what exactly was run.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from rlhf.evaluation import transcript
from rlhf.evaluation.curves import learning_curves
from rlhf.evaluation.figures import interval_chart
from rlhf.evaluation.findings import Finding, compared, findings
from rlhf.evaluation.page import Section, failures, flat, page, table, write_page
from rlhf.evaluation.run_data import RunData
from rlhf.evaluation.wording import duration_text, number_text, percent_text
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
    sections = (
        Section("trust", "Can it be trusted?", _trust(run)),
        Section("curves", "Learning curves", learning_curves(run)),
        Section("trajectories", "Trajectories", _trajectories(run), "Trajectories, token by token"),
        Section("facts", "Facts of the run", _facts(run)),
    )
    beside = "All trajectories are in <code>trajectories/</code>, all metrics in <code>metrics.jsonl</code> beside it."
    return page(escape(f"Run {run.name}"), _subtitle(run), _headline(run), sections, beside=beside)


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
    return escape(" · ".join(parts))


def _duration(run: RunData) -> float:
    return run.lines[-1].time - run.lines[0].time if run.lines else 0.0


def _headline(run: RunData) -> str:
    if not run.results:
        return (
            '<section class="card hero" aria-label="Result"><p>This run has no evaluation yet: it was stopped before '
            "its end, or evaluation is switched off. What follows is what it did so far.</p></section>"
        )
    points = list(run.results.items())
    numbers = [f"<span>{percent_text(points[-1][1]['success'])}</span>"]
    if len(points) > 1:
        first = percent_text(points[0][1]["success"])
        numbers.insert(0, f'<span class="from">{first}</span><span class="arrow" aria-label="to">→</span>')
    rows = [(name, p["success"], p["low"], p["high"]) for name, p in points]
    last = points[-1][1]
    split = f" ({escape(str(last['split']))} split)" if "split" in last else ""
    errors = sum(int(p.get("n_errors") or 0) for _, p in points)
    left_out = f" {errors} attempts ended by the failure of a part and are left out." if errors else ""
    return (
        '<section class="card hero" aria-label="Result"><div>'
        f'<div class="figures">{"".join(numbers)}</div>'
        f'<p class="what">success on {escape(str(last.get("n", "?")))} unseen tasks{split}</p>{_compared(run)}'
        f'<p class="soft">Bars are 95% intervals.{left_out}</p></div>'
        f"<div>{interval_chart(rows, 'Success on unseen tasks', standalone=False)}</div></section>"
    )


def _compared(run: RunData) -> str:
    """Say how first and last evaluation differ on the tasks both attempted."""
    if (result := compared(run)) is None:
        return ""
    d, test = result.difference, "McNemar's test" if result.test == "mcnemar" else "permutation test"
    chance = "p < 0.0001" if result.p_value < 1e-4 else f"p = {result.p_value:.2g}"
    return (
        f'<p class="soft">On the same {d.n} tasks: <b>{100 * d.value:+.1f} points</b>, 95% interval '
        f"{100 * d.low:+.1f} to {100 * d.high:+.1f}; {len(result.better)} tasks better, {len(result.worse)} worse "
        f"({chance}, {test}, mid-p).</p>"
    )


def _trust(run: RunData) -> str:
    found = findings(run)
    if not found:
        return '<p class="soft">Nothing was logged that could tell.</p>'
    order = {"problem": 0, "look": 1, "fine": 2}
    # The gap between trainer and engine leads, whatever it is; then what is wrong.
    tiles = "".join(_tile(f) for f in [*found[:1], *sorted(found[1:], key=lambda f: order[f.level])])
    return f'<div class="tiles">{tiles}</div>{failures(run.folder / "trajectories")}'


def _tile(finding: Finding) -> str:
    words = {"fine": "fine", "look": "worth a look", "problem": "problem"}[finding.level]
    hint = f'<p class="hint">Do: {escape(finding.hint)}</p>' if finding.hint else ""
    return (
        f'<div class="card tile is-{finding.level}"><div class="head"><h3>{escape(finding.name)}</h3>'
        f'<span class="badge {finding.level}">{words}</span></div><div class="figure">{escape(finding.value)}</div>'
        f"<p>{escape(finding.words)}</p>{hint}</div>"
    )


def _trajectories(run: RunData) -> str:
    picked = transcript.choose(run.folder / "trajectories")
    if not picked:
        return '<p class="soft">No trajectories are stored.</p>'
    tokenizer = transcript.load_tokenizer(run.folder)
    scale = max((abs(a) for _, r in picked for row in r.advantages or () for a in row), default=0.0)
    end = number_text(scale)
    legend = (
        '<div class="legend"><span>Advantage of each sampled token: '
        f'<span>−{end}</span><span class="scale" role="img" aria-label="red is negative, blue is positive"></span>'
        f"<span>+{end}</span></span><span>Underlined: sampled by the policy. Grey: read by it. Point at a token, or "
        "focus a trajectory and press <kbd>←</kbd> <kbd>→</kbd>, for its log-prob and advantage.</span></div>"
    )
    return legend + "".join(_article(i, caption, r, tokenizer, scale) for i, (caption, r) in enumerate(picked))


def _article(index: int, caption: str, record: Any, tokenizer: Any | None, scale: float) -> str:
    t = record.trajectory
    score = ""
    if record.score is not None:
        parts = ", ".join(f"{name} {number_text(v.value)}" for name, v in record.score.parts.items())
        score = f" · score {number_text(record.score.total)}" + (f" ({escape(parts)})" if parts else "")
        watched = ", ".join(f"{name} {number_text(v.value)}" for name, v in record.score.watched.items())
        score += f" · watched {escape(watched)}" if watched else ""
    versions = sorted({v for g in t.generations for v in g.versions})
    version = f" · policy version {', '.join(map(str, versions))}" if versions else ""
    credit = "" if record.advantages is not None else " · no advantages in evaluation"
    return (
        f'<article class="card trajectory"><details{" open" if index < 2 else ""}><summary><h3>{escape(caption)}</h3>'
        f'<span class="soft">{escape(record.task_id)} · {len(t.turns)} turns · {t.n_tokens} sampled tokens{score}'
        f'{version}{credit}</span></summary><div class="inner">{transcript.transcript(record, tokenizer, scale)}</div>'
        "</details></article>"
    )


def _facts(run: RunData) -> str:
    cards = []
    if run.recipe:
        cards.append(f'<div class="card"><h3>Recipe, resolved</h3><pre tabindex="0">{escape(run.recipe)}</pre></div>')
    side = ""
    if run.versions:
        side += f'<div class="card"><h3>Versions and hardware</h3>{table((), flat(run.versions))}</div>'
    if times := _times(run):
        side += f'<div class="card" style="margin-top:12px"><h3>Where the time went</h3>{table((), times)}</div>'
    if run.facts:
        side += f'<div class="card" style="margin-top:12px"><h3>Result</h3>{table((), flat(run.facts))}</div>'
    cards.append(f"<div>{side}</div>" if side else "")
    return f'<div class="facts">{"".join(cards)}</div>{_all_metrics(run)}'


def _times(run: RunData) -> list[tuple[str, str]]:
    names = ("time/rollout_s", "time/train_s", "time/eval_s", "time/publish_s")
    rows = [(describe(name).meaning, f"{sum(values):.1f} s") for name in names if (values := run.values(name))]
    if peak := run.values("memory/rss_gb"):
        rows.append(("resident memory, most at any step", f"{max(peak):.2f} GB"))
    return rows


def _all_metrics(run: RunData) -> str:
    rows = []
    for name in sorted({name for line in run.lines for name in line.values}):
        metric = describe(name)
        if values := run.values(name):
            rows.append((name, number_text(values[0]), number_text(values[-1]), metric.unit, metric.meaning))
    if not rows:
        return ""
    shown = table(("metric", "first", "last", "unit", "meaning"), rows)
    return f'<details class="card" style="margin-top:12px"><summary>All {len(rows)} metrics</summary>{shown}</details>'
