"""10,000 maths answers verified by this project on all cores, against math-verify called in a plain loop.

    OMP_NUM_THREADS=1 python benchmarks/reward_speed.py [--n 10000] [--json]

The answers are drawn as models write them, half of them wrong: integers, decimals and fractions, radicals, polynomials
in another form, points, sets and intervals, boxed or in a sentence, all with numbers of their own. `math` decides the
plain ones at once and asks worker processes about the rest, from as many threads as there are cores, and some more. The
plain loop parses reference and answer and verifies, as its README shows. Both end with the number of right verdicts.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import gcd

from rewards.answers.maths import Maths

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    pairs, result = draws(options.n), {}
    for name, verify in (("ours", ours), ("plain_loop", plain_loop)):
        begin = time.perf_counter()
        found = verify(pairs)
        result[f"{name}_s"] = round(time.perf_counter() - begin, 2)
        result[f"{name}_right"] = sum(a == b for a, (_, _, b) in zip(found, pairs, strict=True))
        print(f"{name}: {result[f'{name}_s']} s, {result[f'{name}_right']} of {len(pairs)} verdicts right")
    result["ratio"] = round(result["plain_loop_s"] / result["ours_s"], 2)
    print(f"ratio {result['ratio']} on {os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    if options.json:
        print(json.dumps({"n": options.n, "cores": os.cpu_count(), **result}))


if __name__ == "__main__":
    main()
