"""Language-model judges: pairwise, pointwise, and by principles."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import permutations
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.judges.asking import Asker, MayShowReference, Question, Unreadable, asked, marked, record_of
from rlhf.data import Task, Trajectory, Verdict
from rlhf.errors import RewardError
from rlhf.settings import STRICT

#: What a verdict on two attempts is worth to the one that was shown first.
_WORTH = {"A": 1.0, "TIE": 0.0, "B": -1.0}
_YES, _NO = "yes", "no"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Judge(MayShowReference):
    """Pairwise judge: a model reasons about two attempts at a task, and names the better one.

    Each two attempts are compared twice, in both orders, and the verdicts (better 1, a tie 0, worse −1) are averaged:
    d_ij. A judge that always takes the first finds all attempts equal. Attempt i of G is worth mean_j d_ij, between −1
    and 1, itself counted with 0; `normalised` divides by sqrt(Σ d² / (2 G (G − 1))), which for d_ij = r_i − r_j gives
    the z-score of r. Attempts of which one is r = 1, 0 and ½ are worth ½, −½ and 0, normalised 1, −1 and 0. An attempt
    that stands alone, or like all others, is worth 0. Attempts that read the same are not compared.

    What was said is fenced, and a verdict counts only on a line with a mark that no attempt can know: see
    docs/learned_rewards.md. A model that does not answer, or says no verdict `max_requests` times, makes all attempts
    at the task failures of the reward, and never a score.

    Sources: Think-RM, arXiv 2505.16265, with its pairwise advantage; both orders, arXiv 2306.05685; `elo` and
    `knockout`, Reward Reasoning Models, arXiv 2505.14674.
    """

    #: Values are relative to the other attempts.
    marks_solved: ClassVar[bool] = False

    question: str = "Which attempt does better what the agent was asked to do?"
    """Question to the judge."""
    normalised: bool = False
    """Divide by the typical difference of two attempts."""
    ranking: Literal["mean", "elo", "knockout"] = "mean"
    """Score of an attempt by its verdicts: the mean of its differences; its strength in the model of Bradley, Terry and
    Elo, between −1 and 1; or how many rounds of a knock-out it survives, which takes G − 1 comparisons."""

    def __post_init__(self) -> None:
        """Refuse a division that has no meaning."""
        super().__post_init__()
        if self.normalised and self.ranking != "mean":
            raise ValueError(f"normalised has no effect with ranking: {self.ranking}")

    async def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Compare all attempts at a task. Raises RewardError where that cannot be done."""
        records = [record_of(task, t, self.max_chars) for t in trajectories]
        reference = self.reference_of(task)
        different = list(dict.fromkeys(records))
        n = len(different) - 1
        if self.ranking == "knockout":
            survived = await self._knock_out(different, reference)
            values = [survived[record] for record in records]
        else:
            d_of = await self._differences([(a, b) for a, b in permutations(different, 2)], reference)
            d = [[0.0 if a == b else d_of[a, b] for b in records] for a in records]
            values = elo(d) if self.ranking == "elo" else preferred(d, normalised=self.normalised)
        return [Verdict(x, f"{x:+.2f} against {n} other{'s' * (n != 1)}, by a judge") for x in values]

    async def _differences(
        self, pairs: Sequence[tuple[str, str]], reference: str | None
    ) -> dict[tuple[str, str], float]:
        """Return by how much the first of each pair is preferred, both orders averaged; `pairs` holds both."""
        said = await self.all_of(self._call(first, second, reference) for first, second in pairs)
        worth = dict(zip(pairs, said, strict=True))
        return {(a, b): (worth[a, b] - worth[b, a]) / 2 for a, b in pairs}

    async def _knock_out(self, records: Sequence[str], reference: str | None) -> dict[str, float]:
        """Return for each record the share of the rounds that it survives; ties go to the first."""
        left, survived, n_rounds = list(records), dict.fromkeys(records, 0), 0
        while len(left) > 1:
            matches = list(zip(left[::2], left[1::2], strict=False))
            d_of = await self._differences([pair for a, b in matches for pair in ((a, b), (b, a))], reference)
            beaten = {b if d_of[a, b] >= 0 else a for a, b in matches}
            left, n_rounds = [record for record in left if record not in beaten], n_rounds + 1
            for record in left:
                survived[record] += 1
        return {record: n / max(n_rounds, 1) for record, n in survived.items()}

    def _call(self, first: str, second: str, reference: str | None) -> Callable[[Asker], Awaitable[float]]:
        question = compared(self.question, first, second, reference)
        return lambda asker: asker.verdict(question, lambda reply: _WORTH[marked(reply, question.mark, "A|B|TIE")])


def compared(question: str, first: str, second: str, reference: str | None = None) -> Question:
    """Return the prompt of a judge that compares two records."""
    wanted = (
        f"{question}\n\nThe order in which the attempts are shown means nothing. Reason first. Then end with "
        "one line, VERDICT {mark}: A or VERDICT {mark}: B for the better one, or VERDICT {mark}: TIE."
    )
    return asked([("Attempt A", first), ("Attempt B", second)], wanted, reference)


def of_principle(principle: str, record: str, reference: str | None = None) -> Question:
    """Return the prompt of a judge of one principle."""
    wanted = f"Is this true of the attempt: {principle}\nAnswer with one word, Yes or No."
    return asked([("Attempt", record)], wanted, reference)


def preferred(d_GG: Sequence[Sequence[float]], *, normalised: bool = False) -> list[float]:
    """Return `[G]`, mean_j d_ij; normalised, over sqrt(Σ d² / (2 G (G − 1))). All 0 where nothing is preferred.

    Args:
        d_GG: `[G][G]` by how much i is preferred to j, with 0 on the diagonal.
        normalised: divide.
    """
    n = len(d_GG)
    means = [math.fsum(row) / n for row in d_GG]
    squares = math.fsum(x * x for row in d_GG for x in row)
    if not normalised or not squares:
        return means
    return [x / math.sqrt(squares / (2 * n * (n - 1))) for x in means]


def elo(d_GG: Sequence[Sequence[float]]) -> list[float]:
    """Return `[G]`, (p_i − 1) / (p_i + 1) of the strengths p of Bradley and Terry, between −1 and 1; G ≥ 1.

    P(i before j) = p_i / (p_i + p_j); in units of Elo the rating is 400 log10 p_i. The strengths maximise the
    likelihood of the shares (1 + d_ij) / 2, with one tie of each attempt against a strength of 1, so that one who
    always wins stays finite: p_i = (½ + Σ_j (1 + d_ij) / 2) / (1 / (p_i + 1) + Σ_j 1 / (p_i + p_j)), iterated. Of two
    attempts, one of which always wins: p = 2.130395 and 1 / p, values .361103 and −.361103. All alike: 0.

    Source: the iteration of Hunter, Annals of Statistics 32, 2004.
    """
    n = len(d_GG)
    p = [1.0] * n
    for _ in range(200):
        p = [
            (0.5 + math.fsum((1 + d_GG[i][j]) / 2 for j in range(n) if j != i))
            / (1 / (p[i] + 1) + math.fsum(1 / (p[i] + p[j]) for j in range(n) if j != i))
            for i in range(n)
        ]
    return [(x - 1) / (x + 1) for x in p]


#: Points as judges write them: 8, 8.5, 8/10, 8 points.
_POINTS = r"(?:10(?:\.0+)?|[0-9](?:\.[0-9]+)?)(?:\s*/\s*10|\s+points?)?"


def points_of(said: str) -> float:
    """Points of ten between 0 and 1, of a text that begins with their number."""
    return float(said.split("/")[0].split()[0]) / 10


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Grade(MayShowReference):
    """Pointwise judge: a model reasons, and gives 0 to 10 points, here 0 to 1; or yes or no.

    With `scale: yes_no` the value is 1 or 0, and with `unreadable: wrong` a reply without a verdict is a 0, as where a
    policy judges itself: verdicts yes, no and unreadable are 1, 0, 0. The judge then has to be an earlier policy, by
    `path`, and never the one in training; and its verdicts have to be compared with labels on some tasks.

    What was said is fenced, and a verdict counts only on a line with a mark that no attempt can know: see
    docs/learned_rewards.md. A model that does not answer is a failure of the reward, and never a score.

    Sources: as a judge of its own, arXiv 2505.08827; points, arXiv 2306.05685.
    """

    question: str = "How well does the agent do what it was asked to do?"
    """Question to the judge."""
    scale: Literal["points", "yes_no"] = "points"
    """0 to 10 points, or yes or no."""
    unreadable: Literal["error", "wrong"] = "error"
    """Handling of a reply without a verdict: asked again up to `max_requests` and then an error, or at once a 0."""

    @property
    def marks_solved(self) -> bool:
        """True if a 1 is a yes; points imply no threshold."""
        return self.scale == "yes_no"

    async def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge one attempt. Raises RewardError where that cannot be done."""
        what = "0 to 10, the number of points" if self.scale == "points" else "YES or NO"
        wanted = f"{self.question}\n\nReason first. Then end with one line, VERDICT {{mark}}: and {what}."
        reference = self.reference_of(task)
        question = asked([("Attempt", record_of(task, trajectory, self.max_chars))], wanted, reference)

        async def call(asker: Asker) -> float:
            return await asker.verdict(question, lambda reply: self._read(reply, question))

        [value] = await self.all_of([call])
        return Verdict(value, f"{value:.2f} by a judge")

    def _read(self, reply: str, question: Question) -> float:
        try:
            if self.scale == "points":
                return points_of(marked(reply, question.mark, _POINTS))
            return float(marked(reply, question.mark, "YES|NO") == "YES")
        except Unreadable:
            if self.unreadable == "wrong":
                return 0.0
            raise


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Principles(MayShowReference):
    """Principle adherence: log p(Yes) − log p(No) of a model asked about each principle, in nats.

    Probabilities of .7 and .2 are worth 1.252763; normalising them among the two changes nothing. Each difference is
    brought within ±`max_difference`, and the value is their mean. Yes and No count in every way of writing them. Where
    one of the two is not among the likeliest tokens that the server lists, it is taken for as likely as the last of
    those; where both are missing the model has not answered, which is an error.

    What was said is fenced: see docs/learned_rewards.md. A model that fails is a failure of the reward, never a score.

    Source: RLBFF, arXiv 2509.21319.
    """

    #: Values are differences of log-probs.
    marks_solved: ClassVar[bool] = False

    principles: Annotated[tuple[str, ...], Field(min_length=1)]
    """Principles, each as a statement about the attempt: the answer uses no tool twice."""
    max_difference: Annotated[float, Field(gt=0)] = 5.0
    """Largest difference that counts, in nats."""

    async def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge one attempt. Raises RewardError where that cannot be done."""
        record = record_of(task, trajectory, self.max_chars)
        reference = self.reference_of(task)
        found = await self.all_of(self._call(record, principle, reference) for principle in self.principles)
        kept = [max(-self.max_difference, min(self.max_difference, x)) for x in found]
        why = ", ".join(f"{x:+.2f} {principle[:40]!r}" for x, principle in zip(kept, self.principles, strict=True))
        return Verdict(math.fsum(kept) / len(kept), why)

    def _call(self, record: str, principle: str, reference: str | None) -> Callable[[Asker], Awaitable[float]]:
        question = of_principle(principle, record, reference)

        async def call(asker: Asker) -> float:
            return yes_over_no(await asker.first_token(question))

        return call


def yes_over_no(listed: Sequence[tuple[str, float]]) -> float:
    """The difference log p(Yes) − log p(No) in nats, from the likeliest tokens and their log-probs.

    Raises:
        RewardError: neither of the two is among them.
    """
    sums: Mapping[str, list[float]] = {_YES: [], _NO: []}
    for token, logp in listed:
        word = token.strip(" \t\n\"'*.▁Ġ").casefold()
        if word in sums:
            sums[word].append(logp)
    if not any(sums.values()):
        raise RewardError(
            "the model answered neither yes nor no",
            where="principles",
            got=", ".join(repr(token) for token, _ in listed[:5]),
            expected="Yes or No among the likeliest tokens",
            hint="use a model that follows instructions",
        )
    least = min(logp for _, logp in listed)
    yes, no = (_log_sum(found) if found else least for found in (sums[_YES], sums[_NO]))
    return yes - no


def _log_sum(logps: Sequence[float]) -> float:
    most = max(logps)
    return most + math.log(math.fsum(math.exp(x - most) for x in logps)) if math.isfinite(most) else most
