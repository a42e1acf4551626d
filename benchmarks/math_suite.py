"""Errors of maths verifiers on the suite: this project's, bare math-verify and TRL's accuracy reward, on equal cases.

    OMP_NUM_THREADS=1 python benchmarks/math_suite.py [--json] [--write] [--wrong NAME]

Twice: the answers as they are, and each in a box where it stands alone, which is the form the other two are made for.
TRL takes part where it is installed (`pip install trl`). `--write` puts the table into docs/rewards.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from rewards.answers.maths import Maths
from rewards.suite import Case, Judged, by_category, load, run

PAGE = Path(__file__).resolve().parent.parent / "docs" / "rewards.md"
BEGIN, END = "<!-- suite: written by benchmarks/math_suite.py -->", "<!-- end of suite -->"
#: Categories in which how the answer is presented is what is tested.
_AS_THEY_ARE = {"prose", "several", "nothing", "injection", "enormous", "malformed", "mixed"}


def math_verify(answer: str, reference: str) -> float:
    """What its README shows: parse both, verify. What it raises counts as a verdict of 0."""
    from math_verify import parse, verify

    try:
        return float(verify(parse(f"${reference}$"), parse(answer)))
    except Exception:
        return 0.0


def trl_accuracy(answer: str, reference: str) -> float:
    """TRL's reward for one completion; None, which leaves the example out of its training, counts as 0."""
    from trl.rewards import accuracy_reward

    try:
        [value] = accuracy_reward([[{"role": "assistant", "content": answer}]], [f"${reference}$"])
    except Exception:
        return 0.0
    return float(value or 0.0)


def verifiers() -> dict[str, Callable[..., Any]]:
    """Those that are installed, by the name of their column."""
    found: dict[str, Callable[..., Any]] = {"`{kind: math}`": Maths()}
    found[f"math-verify {metadata.version('math-verify')}"] = math_verify
    if importlib.util.find_spec("trl") is not None:
        found["TRL's accuracy reward"] = trl_accuracy
    return found


def in_boxes(cases: Sequence[Case]) -> list[Case]:
    """The cases whose answer stands alone, each in a box."""
    alone = [
        c
        for c in cases
        if c.category not in _AS_THEY_ARE and not any(m in c.answer for m in ("boxed", "<", " is ", ":"))
    ]
    bare = [(c, c.answer.strip().removeprefix("$").removesuffix("$").strip("*")) for c in alone]
    return [replace(c, answer=rf"\boxed{{{text}}}") for c, text in bare if "$" not in text and "\n" not in text]


def errors(judged: Sequence[Judged]) -> tuple[int, int]:
    """False negatives and false positives."""
    return sum(j.false_negative for j in judged), sum(j.false_positive for j in judged)


def table(judged: dict[str, list[Judged]]) -> str:
    """False negatives / false positives of each verifier in each category, as Markdown."""
    first = next(iter(judged.values()))
    lines = [f"| category | right | wrong | {' | '.join(judged)} |", "|---|" + "---:|" * (2 + len(judged))]
    groups = {name: by_category(of) for name, of in judged.items()}
    for category, of in by_category(first).items():
        lines.append(_row(category, of, [errors(groups[name][category]) for name in judged]))
    lines.append(_row("**all**", first, [errors(of) for of in judged.values()]))
    return "\n".join(lines)


def _row(name: str, of: Sequence[Judged], found: Sequence[tuple[int, int]]) -> str:
    n_right = sum(j.case.right for j in of)
    return f"| {name} | {n_right} | {len(of) - n_right} | {' | '.join(f'{a} / {b}' for a, b in found)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--wrong", default="", help="list what the verifier whose name begins like this judges wrongly")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    cases = load("math")
    judged = {name: run_in_main_thread(verifier, cases) for name, verifier in verifiers().items()}
    boxed = {name: run_in_main_thread(verifier, in_boxes(cases)) for name, verifier in verifiers().items()}
    total = _row("each answer in a box", next(iter(boxed.values())), [errors(of) for of in boxed.values()])
    text = f"{table(judged)}\n{total}"
    print(text)
    for name, of in [*judged.items(), *boxed.items()]:
        for j in of if options.wrong and name.strip("`{").startswith(options.wrong) else ():
            if j.false_negative or j.false_positive:
                print(j.case.id, "FN" if j.case.right else "FP", j.case.reference, "|", j.case.answer[:100], "|", j.why)
    if options.write:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}", "utf-8")
    if options.json:
        print(json.dumps({name: errors(of) for name, of in judged.items()}))


def run_in_main_thread(verifier: Callable[..., Any], cases: Sequence[Case]) -> list[Judged]:
    """The other two stop a call by a signal, which works in the main thread only."""
    if isinstance(verifier, Maths):
        return run(verifier, cases)
    return [Judged(case, verifier(case.answer, case.reference), "", 0.0) for case in cases]


if __name__ == "__main__":
    main()
