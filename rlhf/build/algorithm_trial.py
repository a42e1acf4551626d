"""Trial of a recipe's own advantage estimators and losses: each is called with a small made-up step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rlhf.credit.estimator import AdvantageEstimator, compute_advantages, needs_branches, with_nested
from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Score, ScoredGroup, Trajectory, Turn, Values, Verdict
from rlhf.data.report import ContractChecker, Report, shorten
from rlhf.losses.policy_loss import LossInputs, LossNeeds, LossOutput, PolicyLoss, whole_of
from rlhf.losses.trajectories import trajectories_of
from rlhf.recipe import Recipe
from rlhf.registry import kind_of
from rlhf.sinks import checked
from rlhf.training.backends.token_stats import wanted_by
from rlhf.training.stages.policy_gradient import PolicyGradient


def own_algorithms(recipe: Recipe) -> Iterator[Report]:
    """Report on each advantage estimator and loss of the recipe's stages that is none of the catalogue.

    Left out are estimators that compare attempts which branch off others: a made-up step has none.
    """
    for i, stage in enumerate(recipe.stages):
        if not isinstance(stage, PolicyGradient):
            continue
        path, advantage = f"stages[{i}]", stage.advantage
        nested = list(with_nested(advantage))
        if any(":" in kind_of("advantage", one) for one in nested) and not any(map(needs_branches, nested)):
            names = list(recipe.at(stage).trained_rewards)
            yield _tried_advantage(f"{path}.advantage", advantage, names, stage.group_size)
        if ":" in kind_of("loss", stage.loss):
            yield _tried_loss(f"{path}.loss", stage.loss)


def _tried_advantage(path: str, estimator: AdvantageEstimator, names: Sequence[str], size: int) -> Report:
    checker = ContractChecker(f"{path} ({type(estimator).__name__})")
    unlike = _group("unlike", [1.0 - 0.5 * (i % 3) for i in range(size)], names)
    alike, alone = _group("alike", [0.0] * size, names), _group("alone", [1.0], names)
    steps = {
        "attempts of different scores": [unlike],
        "attempts of equal scores": [alike],
        "one attempt, where the others failed": [alone],
        "the groups of a step": [unlike, alike, alone],
    }

    async def walked() -> None:
        for what, groups in steps.items():
            promise = f"advantage: a finite number for each sampled token of {what}"
            ok, credits = await checker.call(
                promise, compute_advantages, estimator, groups, [_values(group) for group in groups]
            )
            for credit in credits if ok else ():
                await checker.call("advantage: its metrics can be logged", checked, credit.metrics)

    return checker.run(walked)


def _tried_loss(path: str, loss: PolicyLoss) -> Report:
    checker, inputs = ContractChecker(f"{path} ({type(loss).__name__})"), _inputs(loss)

    async def walked() -> None:
        ok, found = await checker.call("loss: raises nothing", loss, inputs)
        if not ok or not checker.note(isinstance(found, LossOutput), "loss: gives a LossOutput", shorten(found)):
            return
        value = found.loss
        is_scalar = isinstance(value, torch.Tensor) and value.shape == () and bool(value.isfinite())
        if checker.note(is_scalar, "loss: is a finite scalar tensor", shorten(value)):
            await checker.call("loss: can be differentiated", value.backward)
            slope = inputs.policy_logprobs.grad
            is_finite = slope is not None and bool(slope.isfinite().all())
            got = "no gradient reaches policy_logprobs" if slope is None else f"gradient {slope.tolist()}"
            checker.note(is_finite, "loss: has a finite gradient in policy_logprobs", got)
        await checker.call("loss: its metrics can be logged", _check_metrics, found)

    return checker.run(walked)


def _check_metrics(found: LossOutput) -> Mapping[str, Any]:
    return checked({**found.metrics, **found.metrics_max})


def _group(task_id: str, scores: Sequence[float], names: Sequence[str]) -> ScoredGroup:
    """Attempts with these scores, the first of one turn, the next of two, and so on in turns."""
    attempts = [_attempt(task_id, i, 1 + i % 2, solved=score > 0) for i, score in enumerate(scores)]
    turns = [(*(0.0 for _ in one.turns[1:]), score) for one, score in zip(attempts, scores, strict=True)]
    judged = tuple(Score(dict.fromkeys(names, Verdict(of[-1], "", of)), of, of[-1]) for of in turns)
    return ScoredGroup(task_id, tuple(attempts), judged)


def _attempt(task_id: str, number: int, n_turns: int, *, solved: bool) -> Trajectory:
    turns = []
    for k in range(n_turns):
        ids = tuple(range(3, 5 + k))
        said = Generation(Prompt((1, 2), stop_ids=(0,)), ids, (-0.5,) * len(ids), Finish.STOP, 0)
        turns.append(Turn(Action("act", (said,)), "reply", state_key=f"state {k}"))
    outcome = Outcome.SOLVED if solved else Outcome.FAILED
    return Trajectory(task_id, number, "opening", tuple(turns), outcome)


def _values(group: ScoredGroup) -> Values:
    tokens = tuple(tuple((0.25,) * g.n_tokens for g in t.generations) for t in group.trajectories)
    return Values(tokens, (0.0,) * len(group.trajectories), tokens)


def _inputs(loss: PolicyLoss) -> LossInputs:
    """Two attempts of one group, of three tokens each: one of a positive, one of a negative advantage."""
    old = torch.tensor([-0.1, -0.5, -2.0, -0.2, -1.0, -3.0])
    policy = (old + torch.tensor([0.1, -0.1, 0.0, 0.3, -0.3, 0.0])).requires_grad_()
    advantages, sequences = torch.tensor([1.0] * 3 + [-1.0] * 3), torch.tensor([0] * 3 + [1] * 3)
    needs, wanted = LossNeeds(loss), wanted_by(loss)
    made = LossInputs(
        policy_logprobs=policy,
        old_logprobs=old,
        sampler_logprobs=old,
        advantages=advantages,
        weights=torch.full((6,), 1 / 6),
        trajectory_ids=sequences,
        ref_logprobs=old - 0.1 if needs.needs_ref else None,
        entropy=-policy if "entropy" in wanted else None,
        n_minibatch_tokens=6,
        token_positions=torch.tensor([0, 1, 2] * 2),
        log_normalizers=-policy if "log_normalizers" in wanted else None,
        ref_log_normalizers=-old if needs.needs_ref and "log_normalizers" in wanted else None,
        mean_logprobs=old - 2.0 if "mean_logprobs" in wanted else None,
        teacher_logprobs=old - 0.2 if needs.teacher is not None else None,
        staleness=torch.zeros(6, dtype=torch.int64),
    )
    if needs.needs_whole is None:
        return made
    trajectories = trajectories_of(policy.detach(), old, advantages, sequences, torch.zeros(6, dtype=torch.int64))
    return replace(made, trajectories=trajectories, whole=whole_of([made]))
