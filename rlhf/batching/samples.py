"""Samples: one flat token row with aligned mask, log-probs and advantages.

A trajectory is cut into rows in one of two layouts, which give the same gradient under any reduction that counts
trajectories: `generation`, one row for each call of the policy, or `trajectory`, where calls whose prompts extend each
other share a row and so the forward pass over their common prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import numpy as np
import numpy.typing as npt

from rlhf.data import Credit, Generation, ScoredGroup
from rlhf.data.generation import DEMONSTRATED, calls_of, versions_of
from rlhf.errors import DataError

#: Token ids are int32, as generations hold them, unless an id needs more.
Ints = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Layout = Literal["trajectory", "generation"]
#: A generation that sampled something, the credit of its tokens, and their returns where an estimator gives any.
_Credited = tuple[Generation, Sequence[float], Sequence[float] | None]


def placed(values: Floats, mask: Bools) -> Floats:
    """Return a row `[L]` with `values` where the mask is True, in order, and 0 elsewhere."""
    row = np.zeros(len(mask), np.float32)
    row[mask] = values
    return row


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Training row of token ids, mask, log-probs and advantages; all arrays `[L]`.

    Attributes:
        token_ids: prompt, sampled and observation tokens as the model saw and made them.
        mask: True on the tokens to train on: those the policy sampled and nothing else, but for a supervised stage that
            gives observations a weight; never on the first token.
        sampler_logprobs: nats, 0 where the mask is False.
        advantages: 0 where the mask is False.
        sequence: number of the trajectory this row belongs to, unique within the step.
        group: number of the task group, unique within the step.
        old_logprobs: nats, the trainer's before the first update, 0 where the mask is False; None where it takes the
            sampler's.
        correction: factor of each token's weight in the loss, at least 0; None is 1.
        entropy: nats, of the policy's distribution at each token before the first update, 0 where the mask is False;
            None where nothing asks for it.
        old_mean_logprobs: nats, mean of that distribution's log-probs over the vocabulary, likewise.
        teacher_logprobs: nats, of a teacher, 0 where the mask is False and NaN on tokens that it does not teach; None
            without a teacher.
        off_policy: True on tokens to train on that another than the policy wrote; their sampler's log-prob is 0, for it
            is taken to be sure of them. None where there are none.
        values: of a critic for the state before each token, before the first update, 0 where the mask is False; None
            without a critic.
        returns: what those values should have been, likewise.
        versions: of the policy that sampled each token, `DEMONSTRATED` where none did; None where that is not known.
        adapter: role whose adapter reads the row; empty for the shared one, or where there is only one.
        routing: `[L, layers, K]`, experts that each token meets, see `ExpertRouting`; None where it is not replayed.
    """

    token_ids: Ints
    mask: Bools
    sampler_logprobs: Floats
    advantages: Floats
    sequence: int
    group: int
    old_logprobs: Floats | None = None
    correction: Floats | None = None
    entropy: Floats | None = None
    old_mean_logprobs: Floats | None = None
    teacher_logprobs: Floats | None = None
    off_policy: Bools | None = None
    values: Floats | None = None
    returns: Floats | None = None
    versions: Ints | None = None
    adapter: str = ""
    routing: npt.NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        own = (
            self.old_logprobs, self.correction, self.entropy, self.old_mean_logprobs, self.values, self.returns
        )  # fmt: skip
        optional = [a for a in own if a is not None]
        given = [
            a for a in (*optional, self.teacher_logprobs, self.off_policy, self.versions, self.routing) if a is not None
        ]
        lengths = {len(a) for a in (self.token_ids, self.mask, self.sampler_logprobs, self.advantages, *given)}
        if len(lengths) != 1:
            raise DataError("ids, mask, log-probs and advantages differ in length", where="Sample", got=str(lengths))
        if len(self.mask) and self.mask[0]:
            raise DataError("the first token of a row cannot be trained", where="Sample.mask", got="mask[0] is True")
        off = ~self.mask
        if self.sampler_logprobs[off].any() or self.advantages[off].any():
            raise DataError("an observation token carries an advantage or a log-prob", where="Sample")
        if not (np.isfinite(self.advantages).all() and np.isfinite(self.sampler_logprobs).all()):
            raise DataError("advantages and log-probs must be finite", where="Sample")
        if not all(np.isfinite(a).all() for a in optional):
            raise DataError(
                "the trainer's log-probs and the correction must be finite",
                where="Sample",
                hint="the weights of the policy may be broken: lower optimizer.lr, or resume from an older checkpoint",
            )
        if self.correction is not None and (self.correction < 0).any():
            raise DataError(
                "a correction changes the sign of a token's advantage",
                where="Sample.correction",
                got=str(self.correction.min()),
                expected="at least 0",
            )
        if self.off_policy is not None and (self.off_policy & off).any():
            raise DataError("a token that is not trained on cannot be off-policy", where="Sample.off_policy")
        if self.teacher_logprobs is not None and np.isinf(self.teacher_logprobs).any():
            raise DataError("the teacher's log-probs must not be infinite", where="Sample.teacher_logprobs")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def n_policy_tokens(self) -> int:
        """Tokens that are trained on."""
        return int(np.count_nonzero(self.mask))

    def masked(self, mask: Bools) -> Sample:
        """Copy of the row with a narrower mask `[L]`; values of the other tokens are dropped."""

        def within(values: Floats | None) -> Floats | None:
            return None if values is None else np.where(mask, values, np.float32(0))

        return replace(
            self,
            mask=mask,
            sampler_logprobs=np.where(mask, self.sampler_logprobs, np.float32(0)),
            advantages=np.where(mask, self.advantages, np.float32(0)),
            old_logprobs=within(self.old_logprobs),
            correction=within(self.correction),
            entropy=within(self.entropy),
            old_mean_logprobs=within(self.old_mean_logprobs),
            teacher_logprobs=within(self.teacher_logprobs),
            off_policy=None if self.off_policy is None else self.off_policy & mask,
            values=within(self.values),
            returns=within(self.returns),
        )


def make_samples(
    groups: Sequence[ScoredGroup],
    credits: Sequence[Credit],
    layout: Layout = "trajectory",
    roles: Collection[str] | None = None,
) -> tuple[list[Sample], Mapping[str, float]]:
    """Cut the trajectories of a step into rows.

    The ids of a row are those the model was given and those it sampled; nothing is tokenised again. In layout
    `trajectory` a generation continues the row of the one before it if its prompt begins with exactly the ids of that
    row and is read by the same adapter, and begins a new row if not: each such prompt is counted in
    `batch/n_rewritten_prompts`, in either layout.
    Tokens of demonstrations are off-policy. What an opponent sampled (`Generation.opponent`) is only read.

    Args:
        groups: of one step.
        credits: aligned with `groups`.
        layout: how trajectories become rows.
        roles: of the generations to train on; None is all. What others sampled is only read.

    Returns:
        The rows, in the order of the trajectories, and counters. `Sample.group` is the index into `groups`;
        `Sample.sequence` numbers the trajectories of all groups in order. A trajectory without sampled tokens has no
        row, and neither has one that is not trained on (`Credit.train_mask_G`).

    Raises:
        DataError: credit does not match the sampled tokens, or is not finite.
    """
    samples: list[Sample] = []
    n_rewritten = n_without_tokens = sequence = 0
    for number, (group, credit) in enumerate(zip(groups, credits, strict=True)):
        _check_count(len(credit.advantages_GNT), len(group.trajectories), group, "trajectories")
        returns_GNT = (None,) * len(group.trajectories) if credit.returns_GNT is None else credit.returns_GNT
        _check_count(len(returns_GNT), len(group.trajectories), group, "trajectories", "returns")
        train_mask_G = (True,) * len(group.trajectories) if credit.train_mask_G is None else credit.train_mask_G
        _check_count(len(train_mask_G), len(group.trajectories), group, "trajectories", "entries of train_mask_G")
        of_trajectories = zip(group.trajectories, credit.advantages_GNT, returns_GNT, train_mask_G, strict=True)
        for trajectory, credit_NT, returns_NT, trains in of_trajectories:
            credited = _credited(trajectory.generations, credit_NT, returns_NT, group)
            own = (found for found in credited if not found[0].opponent)
            runs = list(_runs(found for found in own if roles is None or found[0].role in roles))
            n_rewritten += max(len(runs) - 1, 0)
            n_without_tokens += not runs
            for run in runs if trains else ():
                samples.extend(_rows(run, layout, sequence, number, group))
            sequence += 1
    counters = sample_counters(samples) | {
        "batch/n_rewritten_prompts": float(n_rewritten),
        "batch/n_trajectories_without_tokens": float(n_without_tokens),
    }
    return samples, counters


def sample_counters(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the numbers of rows, of their tokens, and of the tokens trained on."""
    return {
        "batch/n_samples": float(len(samples)),
        "batch/n_tokens": float(sum(map(len, samples))),
        "batch/n_policy_tokens": float(sum(s.n_policy_tokens for s in samples)),
    }


def _credited(
    generations: Sequence[Generation],
    credit_NT: Sequence[Sequence[float]],
    returns_NT: Sequence[Sequence[float]] | None,
    group: ScoredGroup,
) -> list[_Credited]:
    """Return the generations that sampled something, each with what its tokens get."""
    returns = (None,) * len(generations) if returns_NT is None else returns_NT
    _check_count(len(credit_NT), len(generations), group, "generations")
    _check_count(len(returns), len(generations), group, "generations", "returns")
    return [found for found in zip(generations, credit_NT, returns, strict=True) if found[0].n_tokens or found[1]]


def check_roles(groups: Sequence[ScoredGroup], roles: Collection[str]) -> None:
    """Raise DataError where there are generations, and none of a role that is trained.

    For agents that do not declare their roles: one that does may leave a role out in all attempts of a step.
    """
    found = {g.role for group in groups for trajectory in group.trajectories for g in trajectory.generations}
    if found and not found & set(roles):
        raise DataError(
            "no generation has a role that is trained",
            where="train_roles",
            got=", ".join(repr(role) for role in sorted(roles)),
            expected=f"one of {', '.join(repr(role) for role in sorted(found))}",
            hint="plain actions have the empty role; `rlhf trajectories` shows the roles of a run",
        )


def _runs(credited: Iterable[_Credited]) -> Iterator[list[_Credited]]:
    """Yield maximal runs of generations of one adapter, each prompt extending the sequence before it."""
    run: list[_Credited] = []
    for found in credited:
        prompt = found[0].prompt
        if run and not (prompt.extends(run[-1][0]) and prompt.adapter == run[0][0].prompt.adapter):
            yield run
            run = []
        run.append(found)
    if run:
        yield run


def _rows(run: list[_Credited], layout: Layout, sequence: int, number: int, group: ScoredGroup) -> Iterator[Sample]:
    """Yield one row for a run, or one per reply; the rows share the ids' array."""
    ids = run[-1][0].all_ids
    for trained in [run] if layout == "trajectory" else _replies(run):
        last = trained[-1][0]
        n = last.prompt.n_tokens + last.n_tokens
        mask = np.zeros(n, np.bool_)
        off_policy = np.zeros(n, np.bool_) if any(g.policy_version == DEMONSTRATED for g, _, _ in trained) else None
        logprobs, advantages, returns = (np.zeros(n, np.float32) for _ in range(3))
        versions = np.zeros(n, np.int32)
        has_returns = all(returns_T is not None for _, _, returns_T in trained)
        for generation, credit_T, returns_T in trained:
            _check_count(len(credit_T), generation.n_tokens, group, "sampled tokens")
            start = generation.prompt.n_tokens
            span = slice(start, start + generation.n_tokens)
            mask[span], logprobs[span], advantages[span] = True, generation.logps, credit_T
            versions[span] = versions_of(generation)
            if off_policy is not None:
                off_policy[span] = generation.policy_version == DEMONSTRATED
            if returns_T is not None:
                _check_count(len(returns_T), generation.n_tokens, group, "sampled tokens", "returns")
                returns[span] = returns_T
        known = returns if has_returns else None
        row = Sample(ids[:n], mask, logprobs, advantages, sequence, number, off_policy=off_policy, returns=known)
        yield replace(row, adapter=last.prompt.adapter, versions=versions)


def _replies(run: list[_Credited]) -> Iterator[list[_Credited]]:
    """Yield the generations of each reply: one, or the pieces in which attempts have parted."""
    rest = iter(run)
    for pieces in calls_of([generation for generation, _, _ in run]):
        yield list(islice(rest, len(pieces)))


def _check_count(got: int, expected: int, group: ScoredGroup, what: str, given: str = "credit") -> None:
    if got != expected:
        raise DataError(
            f"{given} {'does' if given == 'credit' else 'do'} not match the {what}",
            where=f"group {group.task_id}",
            got=f"{given} for {got}",
            expected=f"{expected} {what}",
            hint="an advantage estimator gives one number per sampled token; Credit.check says where it does not",
        )
