"""`rlhf check reward TARGET --on RUN|FILE`: a reward among attempts that were really made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.commands.contrib.stored import Stored, look
from rlhf.commands.output import results
from rlhf.commands.tables import number
from rlhf.errors import DataError, RecipeError, closest, meant, nearest
from rlhf.evaluation.folder import where_to_look

if TYPE_CHECKING:
    from rewards.suite import Case
    from rlhf.data.report import Report
    from rlhf.evaluation.contrib.rescore import Judgement

#: Attempts that are judged, whole groups spread evenly over a longer run; and those that the contract is tried on.
MAX_ATTEMPTS, N_RECORDS = 1000, 12
_TIMEOUT_S = 60.0
#: Keys of an answer in a file, each with its type.
_KEYS: dict[str, type] = {"answer": str, "reference": str, "right": bool, "id": str, "category": str}


def on_attempts(part: Any, target: str, run: Path) -> tuple[list[Report], list[dict[str, Any]], str]:
    """Walk a reward through its contract on the attempts of a run.

    Returns:
        the reports; the attempts to read, the first of them first; and what these are.
    """
    from rewards.check import check_reward
    from rewards.trl_function import as_reward
    from rlhf.evaluation.contrib.rescore import judge_again, worst

    stored = Stored.read(run)
    stored.make_tasks()
    reward = as_reward(part)
    stored.refuse_without_references(reward, f"--on {run}")
    records = _spread(stored.records)
    step = max(1, len(records) // N_RECORDS)
    report = check_reward(part, [(stored.task(r.task_id), r.trajectory) for r in records[::step]])
    judged = asyncio.run(judge_again(records, reward, stored.task, "success", timeout_s=_TIMEOUT_S))
    rows = [_row(j, stored.folder) for j in worst(judged)]
    alike = len({j.record.trajectory.solved for j in judged}) == 1
    heading = "the lowest values, as all ended alike" if alike else "what the environment contradicts most"
    return [report, _found(target, run, judged)], rows, heading


def refuse_absent(on: Path) -> None:
    """Raise RecipeError where there is neither a folder nor a file."""
    if on.exists():
        return
    beside = sorted(path for path in on.parent.glob("*.jsonl") if path.is_file())
    near = closest(on.name, [path.name for path in beside])
    raise RecipeError(
        "no file or folder of this name",
        where=f"--on {on}",
        got="no such file or folder",
        expected="the folder of a run or an evaluation, or a file of answers that ends in .jsonl",
        hint=meant(str(on.parent / near)) if near else where_to_look(on),
    )


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
    for i, line in enumerate(file.read_text("utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            values: Any = json.loads(line)
        except ValueError as error:
            raise _no_answer(file, i, str(error)[:200]) from error
        if not isinstance(values, dict):
            raise _no_answer(file, i, line[:200])
        values = {"id": f"line {i}", "category": "answers", "right": True, **values}
        for key in [*values, *_KEYS]:
            if key not in _KEYS:
                raise _no_answer(file, i, f"unknown key '{key}'", nearest(key, _KEYS))
            if not isinstance(values.get(key), _KEYS[key]):
                got = f"{key}: {values[key]!r}"[:200] if key in values else f"no key '{key}'"
                raise _no_answer(file, i, got)
        cases.append(Case(**values))
    if not cases:
        raise DataError("there are no answers", where=str(file), got="an empty file", expected="JSON, an object a line")
    return cases


def _no_answer(file: Path, line: int, got: str, hint: str = "") -> DataError:
    return DataError(
        "not an answer",
        where=f"{file}, line {line}",
        got=got,
        expected='{"answer": "...", "reference": "...", "right": true}, with an id and a category if you like',
        hint=hint or "one JSON object a line; a right answer needs no `right`",
    )


def _spread(records: Sequence[Any]) -> list[Any]:
    """Whole groups, spread evenly, of about `MAX_ATTEMPTS` attempts."""
    keys = [(r.stage, r.phase, r.step, r.task_id) for r in records]
    groups = list(dict.fromkeys(keys))
    wanted = max(1, round(len(groups) * min(1.0, MAX_ATTEMPTS / len(records))))
    kept = {groups[i * len(groups) // wanted] for i in range(wanted)}
    return [record for record, key in zip(records, keys, strict=True) if key in kept]


def _found(target: str, run: Path, judged: Sequence[Judgement]) -> Report:
    from rlhf.data.report import Finding, Report, counted
    from rlhf.evaluation.contrib.rescore import failure_summary, rank_correlation

    message, n_failed = failure_summary(judged)
    kept = [(j.after, j.before) for j in judged if j.after is not None]
    findings = [
        Finding(not n_failed, "call: judges every attempt", f"{n_failed} failed: {message}" if n_failed else "")
    ]
    for solved, name in ((1.0, "solved"), (0.0, "not solved")):
        values = sorted(after for after, before in kept if before == solved)
        if values:
            middle = f"median {values[len(values) // 2]:.4g}, from {values[0]:.4g} to {values[-1]:.4g}"
            findings.append(Finding(True, f"values: of {counted(len(values), 'attempt')} that were {name}", middle))
    rank = rank_correlation([a for a, _ in kept], [b for _, b in kept])
    if rank is not None:
        findings.append(Finding(True, "values: rank correlation with success", f"{rank:+.2f}"))
    return Report(f"reward {target} on {counted(len(judged), 'attempt')} of {run}", tuple(findings))


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


def show_worst(rows: Sequence[dict[str, Any]], heading: str) -> None:
    """Print the attempts to read first, under what they are."""
    from rlhf.data.report import shorten

    console = results()
    console.print(f"read first, {heading}:{'' if rows else ' none contradicts'}", soft_wrap=True)
    for row in rows:
        value = "failed" if row["value"] is None else number(row["value"])
        why = f" ({row['why']})" if row["why"] else ""
        line = f"  {value}  {row['outcome']}  {shorten(row['action'], 60)}{why}\n      {row['look']}"
        console.print(line, soft_wrap=True, markup=False)
