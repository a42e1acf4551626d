"""`rlhf check reward TARGET --on RUN|FILE`: a reward among attempts that were really made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.commands.output import results
from rlhf.commands.stored import Stored, look
from rlhf.commands.tables import number
from rlhf.errors import DataError, RecipeError

if TYPE_CHECKING:
    from rewards.suite import Case
    from rlhf.data.report import Report
    from rlhf.evaluation.rescore import Judgement

#: Attempts that are judged, whole groups spread evenly over a longer run; and those that the contract is tried on.
MAX_ATTEMPTS, N_RECORDS = 1000, 12
_TIMEOUT_S = 60.0


def on_attempts(part: Any, target: str, run: Path) -> tuple[list[Report], list[dict[str, Any]]]:
    """Walk a reward through its contract on the attempts of a run, and give them all, the worst first."""
    from rewards.check import check_reward
    from rewards.verified import Verified, is_verifier
    from rlhf.evaluation.rescore import judge_again, worst

    stored = Stored.read(run)
    stored.make_tasks()
    reward = Verified(part) if is_verifier(part) else part
    stored.refuse_without_references(reward, f"--on {run}")
    records = _spread(stored.records)
    step = max(1, len(records) // N_RECORDS)
    report = check_reward(part, [(stored.task(r.task_id), r.trajectory) for r in records[::step]])
    judged = asyncio.run(judge_again(records, reward, stored.task, "success", timeout_s=_TIMEOUT_S))
    rows = [_row(j, stored.folder) for j in worst(judged)]
    return [report, _found(target, run, judged)], rows


def on_answers(part: Any, target: str, file: Path) -> Report:
    """Judge the answers of a file whose verdicts are known."""
    from rewards.suite import report_on
    from rewards.verified import is_verifier

    if not is_verifier(part):
        raise RecipeError(
            "a file of answers is for a verifier",
            where=f"--on {file}",
            got=f"{target}, which is a reward of (task, trajectory)",
            expected="a function of (answer, reference), or the folder of a run",
            hint="name a run",
        )
    return report_on(part, _cases(file), f"the answers of {file}")


def _cases(file: Path) -> list[Case]:
    from rewards.suite import Case

    cases = []
    for i, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = {"id": f"line {i}", "category": "answers", "right": True, **json.loads(line)}
            cases.append(Case(**values))
        except (ValueError, TypeError) as error:
            raise DataError(
                "this is no answer",
                where=f"{file}, line {i}",
                got=str(error)[:200],
                expected='{"answer": "...", "reference": "...", "right": true}',
                hint="one JSON object a line; a right answer needs no `right`",
            ) from error
    if not cases:
        raise DataError("there are no answers", where=str(file), got="an empty file", expected="JSON, an object a line")
    return cases


def _spread(records: Sequence[Any]) -> list[Any]:
    """Whole groups, spread evenly, of about `MAX_ATTEMPTS` attempts."""
    keys = [(r.stage, r.phase, r.step, r.task_id) for r in records]
    groups = list(dict.fromkeys(keys))
    wanted = max(1, round(len(groups) * min(1.0, MAX_ATTEMPTS / len(records))))
    kept = {groups[i * len(groups) // wanted] for i in range(wanted)}
    return [record for record, key in zip(records, keys, strict=True) if key in kept]


def _found(target: str, run: Path, judged: Sequence[Judgement]) -> Report:
    from rlhf.data.report import Finding, Report
    from rlhf.evaluation.rescore import commonest_failure, rank_correlation

    message, n_failed = commonest_failure(judged)
    kept = [(j.after, j.before) for j in judged if j.after is not None]
    findings = [
        Finding(not n_failed, "call: judges every attempt", f"{n_failed} failed: {message}" if n_failed else "")
    ]
    for solved, name in ((1.0, "solved"), (0.0, "not solved")):
        values = sorted(after for after, before in kept if before == solved)
        if values:
            middle = f"median {values[len(values) // 2]:.4g}, from {values[0]:.4g} to {values[-1]:.4g}"
            findings.append(Finding(True, f"values: of {len(values)} attempts that were {name}", middle))
    rank = rank_correlation([a for a, _ in kept], [b for _, b in kept])
    if rank is not None:
        findings.append(Finding(True, "values: rank correlation with success", f"{rank:+.2f}"))
    return Report(f"reward {target} on {len(judged)} attempts of {run}", tuple(findings))


def _row(judged: Judgement, folder: Path) -> dict[str, Any]:
    record = judged.record
    turns = record.trajectory.turns
    return {
        "value": judged.after,
        "outcome": record.trajectory.outcome.value,
        "step": record.step,
        "task": record.task_id,
        "attempt": record.trajectory.attempt,
        "why": judged.why,
        "action": turns[-1].action.text if turns else "",
        "look": look(folder, record),
    }


def show_worst(rows: Sequence[dict[str, Any]]) -> None:
    """Print the attempts to read first."""
    from rlhf.data.report import shorten

    console = results()
    console.print("read first, what the environment contradicts most:", soft_wrap=True)
    for row in rows:
        value = "failed" if row["value"] is None else number(row["value"])
        why = f" ({row['why']})" if row["why"] else ""
        line = f"  {value}  {row['outcome']}  {shorten(row['action'], 60)}{why}\n      {row['look']}"
        console.print(line, soft_wrap=True, markup=False)
