"""Random texts over every reward that judges texts: nothing is raised, every value is within bounds, no call too long.

150 texts for each kind, and 100,000 in `make test-all`; RLHF_FUZZ is another number for either.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from rewards.verified import Verified, is_verifier
from rlhf.catalog import CATALOG
from rlhf.recipe.builder import build_part
from tests.rewards.played import played, task
from tests.test_catalog import MODELS, NEEDED
from tests.test_rewards import BOUNDS, INFO

N, N_EXTENDED = (int(os.environ.get("RLHF_FUZZ", default)) for default in ("150", "100000"))
#: The longest that a call may take on a busy machine: its own limit, and what the clock allows beside it.
LIMIT_S = 30.0
#: What is a model is tried with its own tests.
KINDS = [kind for kind in CATALOG["reward"] if kind not in MODELS]
#: One attempt of so many is a block of code, which is started where a reward runs programs.
PER_PROGRAM = 50
PIECES = (
    "\\boxed{", "\\frac{", "}{", "}", "{", "\\sqrt{", "\\{", "\\}", "$", "$$", "\\(", "\\)", "\\[", "\\]",
    "\\\\", "&", "\\begin{pmatrix}", "\\end{pmatrix}", "\\text{", "\\pm", "\\cup", "\\infty", "\\le", "\\in",
    "\\pi", "^{", "_{", "!", "0", "1", "42", "-7", "3.14", "1,000", "1e9", "10^", "99999999999", "1/0", "%",
    "°", " cm", "½", "²", "٣", "−", "x", "y", "e", "i", "n!", "sin", "log", "=", "<", ">", "+", "*", "**", "/",
    "(", ")", "[", "]", ",", ";", "|", "..", "<think>", "</think>", "<answer>", "</answer>", "<search>",
    "</search>", "<information>", "</information>", "the answer is ", "Answer:", "#### ", "not ", "or ", "and ",
    "I don't know", "(A)", "B.", "cost=", "```json\n", "```", '{"type": "click", "name": "', '"', ": ", "null",
    "NaN", "SELECT * FROM t", " ORDER BY 1", "; DROP TABLE t", "--", "<<<<<<< SEARCH\n", "=======\n",
    ">>>>>>> REPLACE", "### a\n", "\n", " ", "\t", "\x00", "\u202e", "\ud7ff", "🙂", "語",
)  # fmt: skip
REFERENCES = (
    "42",
    "\\frac{1}{2}",
    "x^2+1",
    "(1, 2)",
    "[1, 2)",
    "B",
    "the red ball",
    '["a", "b"]',
    '{"a": 3}',
    "50\\%",
    "",
)


def strange(draw: random.Random) -> str:
    """A text made of what breaks parsers, now and then a long one."""
    n = draw.choice((1, 3, 8, 20)) if draw.random() < 0.995 else 2_000
    if draw.random() < 0.3:
        return "".join(chr(draw.choice((draw.randrange(32, 127), draw.randrange(0xD800)))) for _ in range(n * 2))
    return "".join(draw.choices(PIECES, k=n))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_was_said_breaks_a_reward(kind: str) -> None:
    hear(kind, N)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("numeric", "The answer is {" + " " * 3_900 + "x"),
        ("multiple_choice", "A, " * 6_000 + "B is wrong"),
        ("format", "<tool_call>" * 20_000),
        ("intermediate_answers", "<answer>" * 20_000),
        ("called", "<search>" * 20_000),
    ],
)
def test_a_piece_that_is_said_again_and_again_costs_no_more_than_its_length(kind: str, text: str) -> None:
    part = build_part("reward", {"kind": kind, **NEEDED.get(("reward", kind), {})}, kind, base=Path())
    called = Verified(part) if is_verifier(part) else part
    begin = time.thread_time()
    attempt = played((text, text))
    turns = tuple(replace(turn, action=replace(turn.action, reply_text=text)) for turn in attempt.turns)
    called(replace(task("1"), info=INFO), replace(attempt, turns=turns))
    assert time.thread_time() - begin < 2.0  # a tenth of it, and a minute where a pattern looks ahead at every piece


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
def test_nor_does_a_hundred_thousand_times_as_much(kind: str) -> None:
    hear(kind, N_EXTENDED)


def hear(kind: str, n_texts: int) -> None:
    """Let the reward of this kind judge so many attempts."""
    if CATALOG["reward"][kind].extra and importlib.util.find_spec("math_verify") is None:
        pytest.skip("needs the extra 'rewards'")
    part = build_part("reward", {"kind": kind, **NEEDED.get(("reward", kind), {})}, kind, base=Path())
    called = Verified(part) if is_verifier(part) else part
    references = [reference for _, reference in getattr(part, "examples", ())] or REFERENCES

    def judge(seed: int) -> tuple[float, float, int]:
        draw = random.Random(seed)
        said = [(strange(draw), strange(draw)) for _ in range(draw.choice((1, 1, 1, 2)))]
        if seed % PER_PROGRAM == 0:
            said[-1] = (f"```python\n{said[-1][0]}\n```", said[-1][1])
        begin, one = time.monotonic(), played(*said)
        subject = replace(task(draw.choice(references)), info=INFO)
        if hasattr(called, "over_group"):
            given = called.over_group(subject, [one])
            [verdict] = asyncio.run(given) if inspect.iscoroutine(given) else given
        else:
            given = called(subject, one)
            verdict = asyncio.run(given) if inspect.iscoroutine(given) else given
        return verdict.value, time.monotonic() - begin, len(said)

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(judge, range(n_texts)))
    low, high = zip(*(BOUNDS.get(kind, lambda r: (0, 1))([0.0] * n) for _, _, n in found), strict=True)
    assert all(a - 1e-9 <= v <= b + 1e-9 for a, (v, _, _), b in zip(low, found, high, strict=True))
    assert max(took_s for _, took_s, _ in found) < LIMIT_S
