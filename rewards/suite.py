"""Suites of answers with the verdict each deserves, and how a verifier fares on them.

    rlhf check reward ./mine.py:judge --suite math

A suite is a file of cases in `rewards/suites`, one JSON object a line: `id`, `category`, `reference`, `answer` and
`right`. A long answer is a list of [text, times].
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewards.base import name_of
from rewards.validation import checked_verdict
from rewards.verified import of_pair
from rlhf.data.report import Finding, Report, counted, describe, shorten
from rlhf.errors import RecipeError, RlhfError, nearest

FOLDER = Path(__file__).parent / "suites"
_N_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Case:
    """Answer with its right score.

    Attributes:
        id: its category and a number.
        category: what is hard about it.
        reference: what the task would give the verifier.
        answer: what a model wrote.
        right: whether it deserves full marks; else it deserves nothing.
    """

    id: str
    category: str
    reference: str
    answer: str
    right: bool


@dataclass(frozen=True, slots=True)
class Judged:
    """Judgement of a verifier on a case.

    Attributes:
        case: the case.
        value: its verdict; None where it raised, hung or returned no number.
        why: its reason, or what went wrong.
        took_s: seconds of the call.
    """

    case: Case
    value: float | None
    why: str
    took_s: float

    @property
    def false_negative(self) -> bool:
        """True if a right answer did not get full marks."""
        return self.case.right and self.value != 1

    @property
    def false_positive(self) -> bool:
        """True if a wrong answer got any."""
        return not self.case.right and bool(self.value)


def names() -> list[str]:
    """The suites there are."""
    return sorted(path.stem for path in FOLDER.glob("*.jsonl"))


def load(name: str) -> tuple[Case, ...]:
    """Return the cases of a suite. Raises RecipeError where there is none of that name."""
    path = FOLDER / f"{name}.jsonl"
    if name not in names():
        raise RecipeError(
            f"no suite is called '{name}'",
            where="--suite",
            got=name,
            expected=", ".join(names()),
            hint=nearest(name, names()) or "name one of these",
        )
    return tuple(_case(json.loads(line)) for line in path.read_text("utf-8").splitlines())


def _case(values: dict[str, Any]) -> Case:
    answer = values.pop("answer")
    whole = answer if isinstance(answer, str) else "".join(text * times for text, times in answer)
    return Case(answer=whole, **values)


def run(
    verifier: Callable[..., Any], cases: Iterable[Case], *, call_limit_s: float = 60.0, threads: int = 1
) -> list[Judged]:
    """Ask `verifier` about every case, in order; what it raises is a finding, never raised."""
    with ThreadPoolExecutor(threads, thread_name_prefix="suite") as pool:
        return list(pool.map(lambda case: _judge(verifier, case, call_limit_s), cases))


def _judge(verifier: Callable[..., Any], case: Case, limit_s: float) -> Judged:
    said: list[tuple[float | None, str]] = []
    thread = threading.Thread(target=lambda: said.append(_call(verifier, case)), daemon=True)
    begin = time.perf_counter()
    thread.start()
    thread.join(limit_s)
    value, why = said[0] if said else (None, f"had not returned after {limit_s:g} s")
    return Judged(case, value, why, time.perf_counter() - begin)


def _call(verifier: Callable[..., Any], case: Case) -> tuple[float | None, str]:
    try:
        given = of_pair(verifier)(case.answer, case.reference)
        if inspect.isawaitable(given):
            given = asyncio.run(_awaited(given))
        verdict = checked_verdict(given, name_of(verifier))
    except RlhfError as error:
        return None, str(error)
    except (Exception, SystemExit) as error:
        return None, describe(error)
    return verdict.value, verdict.why


async def _awaited(given: Any) -> Any:
    return await given


def report(verifier: Callable[..., Any], name: str, **options: Any) -> Report:
    """Return one finding per category, kept where every case in it got the verdict it deserves."""
    return report_on(verifier, load(name), f"the suite '{name}'", **options)


def report_on(verifier: Callable[..., Any], cases: Iterable[Case], name: str, **options: Any) -> Report:
    """Return the same of any cases, under the `name` that the reader knows them by."""
    judged = run(verifier, cases, **options)
    findings = [_finding(category, of) for category, of in by_category(judged).items()]
    said = sorted(j.took_s for j in judged)
    n_wrong = sum(j.false_negative for j in judged), sum(j.false_positive for j in judged)
    total = (
        f"{counted(len(judged), 'case')}: {counted(n_wrong[0], 'false negative')}, "
        f"{counted(n_wrong[1], 'false positive')}; "
        f"median {said[len(said) // 2] * 1e3:.3g} ms, longest {said[-1] * 1e3:.3g} ms"
    )
    findings.append(Finding(not any(n_wrong), "all cases", total))
    return Report(f"verifier {name_of(verifier)} on {name}", tuple(findings))


def by_category(judged: Iterable[Judged]) -> dict[str, list[Judged]]:
    """Verdicts by the category of their case, in the order of the suite."""
    found: dict[str, list[Judged]] = {}
    for one in judged:
        found.setdefault(one.case.category, []).append(one)
    return found


def _finding(category: str, judged: Sequence[Judged]) -> Finding:
    wrong = [j for j in judged if j.false_negative or j.false_positive or j.value is None]
    lines = [counted(len(judged), "case")] if not wrong else [f"{len(wrong)} of {len(judged)} judged wrongly"]
    for j in wrong[:_N_SHOWN]:
        kind = "raised or hung" if j.value is None else "false negative" if j.case.right else "false positive"
        reference, answer = shorten(j.case.reference, 40), shorten(j.case.answer, 60)
        lines.append(f"{j.case.id}, {kind}: {answer} for {reference}: {shorten(j.why, 100)}")
    lines += [f"and {len(wrong) - _N_SHOWN} more"] * (len(wrong) > _N_SHOWN)
    return Finding(not wrong, category, "\n".join(lines))
