"""Errors of maths verifiers on equal cases: this project's, bare math-verify, TRL's accuracy reward; and speed.

    OMP_NUM_THREADS=1 python benchmarks/math_verifiers.py [--json] [--write] [--wrong NAME]
    OMP_NUM_THREADS=1 python benchmarks/math_verifiers.py --speed [--n 10000] [--json]

Errors twice: the answers as they are, and each in a box where it stands alone, which is the form the other two are made
for. TRL takes part where it is installed (`pip install trl`). `--write` puts the table into docs/rewards.md.

Speed: answers verified by this project on all cores, against math-verify called in a plain loop. They are drawn as
models write them, half of them wrong: integers, decimals and fractions, radicals, polynomials in another form, points,
sets and intervals, boxed or in a sentence. `math` decides the plain ones at once and asks worker processes about the
rest, from as many threads as there are cores, and some more. The plain loop parses reference and answer and verifies,
as its README shows. Both end with the number of right verdicts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from math import gcd
from pathlib import Path
from typing import Any

import psutil
from pages import write_between

from rewards.answers.maths import Maths
from rewards.suite import Case, Judged, by_category, load, run

PAGE = Path(__file__).resolve().parent.parent / "docs" / "rewards.md"
MARKS = "<!-- suite: written by benchmarks/math_verifiers.py -->", "<!-- end of suite -->"
#: Categories in which how the answer is presented is what is tested.
_AS_THEY_ARE = {"prose", "several", "nothing", "injection", "enormous", "malformed", "mixed"}


def math_verify(answer: str, reference: str) -> float:
    """Verdict as its README shows: parse both, verify; an exception counts as 0."""
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


# --- speed ----------------------------------------------------------------------------------------------------------

#: reference, answer, whether it is right
Pair = tuple[str, str, bool]


def whole(draw: random.Random) -> Pair:
    n, off = draw.randint(-(10**5), 10**5), draw.choice((0, 1))
    return str(n), f"{n + off:,}", not off


def decimal(draw: random.Random) -> Pair:
    n, off = draw.randint(1, 10**6), draw.choice((0, 7))
    return f"{n / 1000:.3f}", rf"{(n + off) / 1000:.4f}", not off


def fraction(draw: random.Random) -> Pair:
    a, b, k, off = draw.randint(1, 999), draw.randint(2, 99), draw.randint(2, 9), draw.choice((0, 1))
    return rf"\frac{{{a}}}{{{b}}}", rf"\dfrac{{{k * a + off}}}{{{k * b}}}", not off


def radical(draw: random.Random) -> Pair:
    a, b, off = draw.randint(2, 99), draw.randint(2, 99), draw.choice((0, 1))
    return rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b + off}}}", not off


def polynomial(draw: random.Random) -> Pair:
    a, b, off = draw.randint(1, 99), draw.randint(1, 99), draw.choice((0, 1))
    return f"x^2+{a + b}x+{a * b}", f"(x+{a})(x+{b + off})", not off


def point(draw: random.Random) -> Pair:
    a, b, off = draw.randint(-99, 99), draw.randint(-99, 99), draw.choice((0, 1))
    return f"({a}, {b})", rf"\left({a},{b + off}\right)", not off


def members(draw: random.Random) -> Pair:
    items, off = draw.sample(range(999), 3), draw.choice((0, 1))
    said = [*items[1:], items[0] + off * 1000]
    return rf"\{{{', '.join(map(str, items))}\}}", rf"\{{{', '.join(map(str, said))}\}}", not off


def interval(draw: random.Random) -> Pair:
    a, width, off = draw.randint(-99, 99), draw.randint(1, 99), draw.choice((0, 1))
    sign = r"\le" if off else "<"
    return f"[{a}, {a + width})", rf"{a} \le x {sign} {a + width}", not off


def angle(draw: random.Random) -> Pair:
    a, b, off = draw.randint(1, 30), draw.randint(2, 30), draw.choice((0, 1))
    d = gcd(a, b)
    return rf"\frac{{{a}\pi}}{{{b}}}", rf"\frac{{{a // d + off}}}{{{b // d}}}\pi", not off


KINDS: tuple[tuple[Callable[[random.Random], Pair], int], ...] = (
    (whole, 40),
    (decimal, 8),
    (fraction, 14),
    (radical, 8),
    (polynomial, 8),
    (point, 6),
    (members, 5),
    (interval, 5),
    (angle, 6),
)
FRAMES = (
    "The final answer is \\boxed{%s}.",
    "So we get\n\\[\n\\boxed{%s}\n\\]",
    "\\boxed{%s}",
    "Thus the answer is $%s$.",
)


def draws(n: int, seed: int = 0) -> list[Pair]:
    """Draw `n` references, answers in a sentence and what they deserve."""
    draw = random.Random(seed)
    makers, weights = zip(*KINDS, strict=True)
    pairs = [make(draw) for make in draw.choices(makers, weights, k=n)]
    return [(reference, draw.choice(FRAMES) % answer, right) for reference, answer, right in pairs]


def ours(pairs: list[Pair]) -> list[bool]:
    """Verify from several threads; the first call of each process loads the algebra, and is counted."""
    verifier = Maths()
    with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as threads:
        return list(threads.map(lambda pair: verifier(pair[1], pair[0]).value == 1, pairs))


def plain_loop(pairs: list[Pair]) -> list[bool]:
    """Call math-verify for one after the other."""
    from math_verify import parse, verify

    return [bool(verify(parse(f"${reference}$"), parse(answer))) for reference, answer, _ in pairs]


def cpu_seconds() -> float:
    """Processor seconds of this process and of those that it started, ended ones too."""
    own = psutil.Process()
    return sum(sum(one.cpu_times()[:4]) for one in (own, *own.children(recursive=True)))


def print_speed(n: int, as_json: bool) -> None:
    """Time both on the same draws."""
    pairs, result = draws(n), {}
    for name, verify in (("ours", ours), ("plain_loop", plain_loop)):
        begin, begin_cpu = time.perf_counter(), cpu_seconds()
        found = verify(pairs)
        result[f"{name}_s"] = round(time.perf_counter() - begin, 2)
        result[f"{name}_cpu_s"] = round(cpu_seconds() - begin_cpu, 2)
        result[f"{name}_right"] = sum(a == b for a, (_, _, b) in zip(found, pairs, strict=True))
        times = f"{result[f'{name}_s']} s, {result[f'{name}_cpu_s']} s of the processor"
        print(f"{name}: {times}, {result[f'{name}_right']} of {len(pairs)} verdicts right")
    result["ratio"] = round(result["plain_loop_s"] / result["ours_s"], 2)
    result["cpu_ratio"] = round(result["plain_loop_cpu_s"] / result["ours_cpu_s"], 2)
    machine = f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"
    print(f"ratio {result['ratio']}, of processor seconds {result['cpu_ratio']}, on {machine}")
    if as_json:
        print(json.dumps({"n": n, "cores": os.cpu_count(), **result}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--wrong", default="", help="list what the verifier whose name begins like this judges wrongly")
    parser.add_argument("--speed", action="store_true", help="measure seconds in the place of errors")
    parser.add_argument("--n", type=int, default=10_000, help="answers with --speed")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.speed:
        return print_speed(options.n, options.json)
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
        write_between(PAGE, MARKS, f"\n{text}\n\n")
    if options.json:
        print(json.dumps({name: errors(of) for name, of in judged.items()}))


def run_in_main_thread(verifier: Callable[..., Any], cases: Sequence[Case]) -> list[Judged]:
    """The other two stop a call by a signal, which works in the main thread only."""
    if isinstance(verifier, Maths):
        return run(verifier, cases)
    return [Judged(case, verifier(case.answer, case.reference), "", 0.0) for case in cases]


if __name__ == "__main__":
    main()
