"""Reports: the viewer's page frozen into one file, with every attempt up to a size, which needs no server.

The file holds the answers that a server would give. Attempts are compressed a step at a time, and unpacked by the
browser when they are looked at; where they do not fit, the ends of a run go in first, and the page says what is left.
"""

from __future__ import annotations

import base64
import gzip
import io
import itertools
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rlhf.digests import read_listed
from rlhf.errors import DataError
from rlhf.evaluation.folder import PLAN, SUMMARY, VERSIONS, is_evaluation
from rlhf.evaluation.run_data import RunData
from rlhf.evaluation.store import StoredStep
from rlhf.evaluation.wording import duration_text, percent_text
from rlhf.viewer.answers import Answers
from rlhf.viewer.attempts import groups
from rlhf.viewer.library import Library, ShownRun
from rlhf.viewer.page import single_file, write_page
from rlhf.viewer.redaction import Redaction
from rlhf.viewer.run_folder import RESULT

#: Name of the page in the folder of a run or of an evaluation.
REPORT = "report.html"
#: Bytes of compressed attempts that a report takes; evaluations that are compared each with each.
LIMIT, MOST_PAIRED = 6_000_000, 12


def write_report(folder: Path, redaction: Redaction | None = None) -> Path:
    """Write `report.html` into the folder of a run or of a finished evaluation; returns its path.

    A run that was stopped early has a report too. The same files give the same page wherever they are.

    Raises:
        CheckpointError: the folder holds no run, a file is not what was written, or the page cannot be written.
        DataError: a file is missing or damaged.
    """
    folder = Path(folder)
    if is_evaluation(folder):
        _require_whole(folder)
    else:
        RunData.read(folder)  # says what is damaged; a viewer leaves that out and goes on
    library = Library([folder])
    answers = Answers(library, redaction or Redaction())
    run = library.runs()[0]
    if is_evaluation(folder):
        run.id = "evaluation"  # the page of what was played twice is the same, whatever its folder is called
    title, lines = answers.redaction.values(_told(run))
    data, kept = frozen(answers, LIMIT)
    start = f"{'evaluation' if is_evaluation(folder) else 'run'}/{run.id}"
    return write_page(folder / REPORT, single_file(title, lines, kept, start, data))


def write_leaderboard(path: Path, folders: Sequence[Path]) -> Path:
    """Write the page of these evaluations and runs, which opens with their ranks; returns its path.

    Raises:
        CheckpointError: it cannot be written.
        DataError: a file is damaged.
    """
    data, kept = frozen(Answers(Library(folders), Redaction()), LIMIT)
    boards = data["answers"]["leaderboard"]["boards"]
    lines = [f"{board['title']}: {', '.join(row['policy'] for row in board['rows'])}" for board in boards]
    return write_page(path, single_file("Leaderboard", lines, kept, "leaderboard", data))


def frozen(answers: Answers, limit: int) -> tuple[dict[str, Any], str]:
    """Answers of a server about all runs, and the attempts left out for size.

    Args:
        answers: about the runs.
        limit: bytes of compressed attempts, of all runs together.
    """
    runs, told = answers.library.runs(), dict[str, Any]()
    files: dict[str, dict[str, str]] = {}
    n_kept, n_files, n_out, left = 0, 0, 0, float(limit)
    for i, run in enumerate(runs):
        files[run.id] = {}
        share = limit * (len(runs) - 1 - i) / len(runs)  # of the runs after this one
        for stored in by_interest(run.attempts.steps()):
            n_files += 1
            if left <= share:
                continue
            packed, n = _packed(answers, run, stored, left - share)
            left -= len(packed)
            files[run.id][f"{stored.stage}:{stored.phase}:{stored.step}"] = base64.b64encode(packed).decode()
            n_kept, n_out = n_kept + 1, n_out + n
        told |= _of_run(answers, run, files[run.id])
    told["runs"] = {"runs": [told[f"run/{run.id}"] for run in runs]}
    told["leaderboard"] = answers.leaderboard()
    told |= _pairs(answers, runs, {board["rows"][0]["run"] for board in told["leaderboard"]["boards"]})
    kept = (
        "All attempts are in it."
        if n_kept == n_files and not n_out
        else f"It holds the attempts of {n_kept} of {n_files} steps and evaluations"
        + (f", without {n_out:,} of these attempts" if n_out else "")
        + "; rlhf view FOLDER shows all."
    )
    return {"answers": told, "files": files}, kept


def by_interest(files: Sequence[StoredStep]) -> list[StoredStep]:
    """Files in the order in which they are worth room: ends before middles, and these ever finer."""
    evaluations = [stored for stored in files if stored.phase == "eval"]
    training = [stored for stored in files if stored.phase != "eval"]
    ends = list(dict.fromkeys([*evaluations[-1:], *evaluations[:1]]))
    middle = [stored for stored in evaluations if stored not in ends]
    return [*ends, *(training[i] for i in _ever_finer(len(training))), *middle]


def _ever_finer(n: int) -> Iterator[int]:
    """0 to n - 1, the ends first, then middles of the gaps: 0, 8, 4, 2, 6, ..."""
    known = set[int]()
    parts = 1
    while len(known) < n:
        for k in range(parts, -1, -1):
            i = round((n - 1) * k / parts)
            if i not in known:
                known.add(i)
                yield i
        parts *= 2


def _packed(answers: Answers, run: ShownRun, stored: StoredStep, room: float) -> tuple[bytes, int]:
    """The groups of a step and its attempts until `room` bytes are full, the same bytes for the same step.

    Also returns how many attempts are left out.
    """
    untimed = _untimed if is_evaluation(run.folder) else lambda values: values
    packed = io.BytesIO()
    try:
        rows, settings = run.attempts.rows(stored), run.poll().settings
        values = {"groups": answers.redaction.values(groups(rows)), "n_attempts": len(rows)}
        n = 0
        with _gzipped(packed) as file:
            file.write(_json(untimed(values))[:-1] + b',"attempts":[')
            for row, record in enumerate(run.attempts.records(stored)):
                if packed.tell() >= room:
                    break
                attempt = answers.attempt(run, settings, stored, record, row, run.id)
                file.write(b"," * bool(row) + _json(untimed(attempt)))
                n += 1
            file.write(b"]}")
        return packed.getvalue(), len(rows) - n
    except DataError as error:
        packed = io.BytesIO()
        with _gzipped(packed) as file:
            file.write(_json({"problem": answers.redaction.text(str(error))}))
        return packed.getvalue(), 0


def _gzipped(file: io.BytesIO) -> gzip.GzipFile:
    return gzip.GzipFile("", "wb", 6, file, mtime=0)


def _json(values: Any) -> bytes:
    text = json.dumps(values, allow_nan=False, default=str, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def _untimed(value: Any) -> Any:
    """Plain values without seconds: an evaluation that is made again, or gone on with, has the same page."""
    if isinstance(value, dict):
        return {name: 0.0 if name in ("duration_s", "seconds") else _untimed(one) for name, one in value.items()}
    return [_untimed(one) for one in value] if isinstance(value, list | tuple) else value


def _of_run(answers: Answers, run: ShownRun, kept: dict[str, str]) -> dict[str, Any]:
    """Answers about one run; as what it is now, whatever writes in its folder, and without where that is."""
    head = answers.run(run.id)
    is_over = any((run.folder / name).is_file() for name in (RESULT, SUMMARY))
    head |= {"state": "finished" if is_over else "stopped", "folder": run.id}
    head |= {"name": run.id} if is_evaluation(run.folder) else {}
    head |= {"waits_for": "", "left_s": None, "now": head["updated"]}
    stored = [
        {**one, "steps": [step for step in one["steps"] if f"{one['stage']}:{one['phase']}:{step}" in kept]}
        for one in answers.steps(run.id)["stored"]
    ]
    found = {
        "": head,
        "/metrics": answers.metrics(run.id),
        "/steps": {"stored": [one for one in stored if one["steps"]]},
        "/judges": answers.judges(run.id),
        "/facts": answers.facts(run.id),
    }
    for name in head["stored"]:
        values = answers.evaluation(run.id, name)
        for task in values["hardest"]:
            if (at := task["place"]) and f"{at['stage']}:{at['phase']}:{at['step']}" not in kept:
                task["place"] = None
        found["/evaluation" + (f"?{urlencode({'name': name})}" if name else "")] = values
        found["/evaluation"] = values  # the last one
    return {f"run/{run.id}{path}": values for path, values in found.items()}


def _pairs(answers: Answers, runs: Sequence[ShownRun], best: Collection[str]) -> dict[str, Any]:
    """Evaluations compared with each other; where there are many, those of a run, and all with `best` and the first."""
    sides = [(run.id, name) for run in runs for name in answers.run(run.id)["stored"]]
    with_all = {*best, *(run for run, _ in sides[:1])}
    pairs = (
        (one, other)
        for one, other in itertools.combinations(sides, 2)
        if len(sides) <= MOST_PAIRED or one[0] == other[0] or {one[0], other[0]} & with_all
    )
    asked = ({"first": ":".join(first), "second": ":".join(second)} for first, second in pairs)
    return {f"compare?{urlencode(one)}": answers.compare(**one) for one in asked}


def _told(run: ShownRun) -> tuple[str, list[str]]:
    """Title of a report, and its result in words."""
    data, summary = run.poll(), run.summary
    if is_evaluation(run.folder):
        n_each = f", {summary['attempts']} attempts at each" if summary["attempts"] > 1 else ""
        success = summary["success"]
        lines = [f"{summary['n_tasks']} tasks{n_each}, {summary['n_errors']} errors."]
        if success["value"] is not None:
            lines.append(f"Success {_interval(success['value'], success['low'], success['high'])}.")
        return f"{summary['policy']} on {summary['suite']}", lines
    points = [
        f"{name}: success {_interval(p['success'], p['low'], p['high'])} in {p.get('n', '?')} attempts at unseen tasks."
        for name, p in data.results.items()
    ]
    none = "This run has no evaluation yet: it was stopped before its end, or evaluation is switched off."
    return f"Run {data.name}", [_subtitle(data), *(points or [none])]


def _subtitle(data: RunData) -> str:
    parts = [str(kind)] if (kind := data.setting("environment.kind")) else []
    if steps := sum(len(curve.steps) for curve in data.curves("rollout/success")):
        parts.append(f"{steps} steps")
    if episodes := sum(data.values("rollout/n_episodes")):
        parts.append(f"{episodes:,.0f} training episodes")
    if len(data.lines) > 1:
        parts.append(duration_text(data.lines[-1].time - data.lines[0].time))
    if (seed := data.setting("seed")) is not None:
        parts.append(f"seed {seed}")
    return " · ".join(parts)


def _interval(value: float, low: float, high: float) -> str:
    return f"{percent_text(value)}, 95% interval {percent_text(low)} to {percent_text(high)}"


def _require_whole(folder: Path) -> None:
    """Raise DataError where a file of an evaluation is missing or damaged."""
    for name in (SUMMARY, PLAN, VERSIONS):
        try:
            text = read_listed(folder / name)
            if name != PLAN:
                json.loads(text)
        except (OSError, ValueError) as error:
            message = "this file is missing or damaged"
            raise DataError(message, where=str(folder / name), got=str(error)[:200]) from error
