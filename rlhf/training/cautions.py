"""Warnings about a rollout that the run survives, such as truncation and failed attempts."""

from __future__ import annotations

from rlhf.data import Finish, Outcome
from rlhf.rollout.episode import UNDECIDED
from rlhf.rollout.limits import Limits
from rlhf.rollout.runner import RolloutBatch
from rlhf.rollout.scoring import commonest_failure
from rlhf.training.backends.optimizer import AdamW

#: Share of the generations that may be cut before it is worth a word.
TRUNCATED_SHARE = 0.01


def cautions(collected: RolloutBatch, limits: Limits, where: str) -> dict[str, str]:
    """Cautions on a rollout, one sentence each, by a name that prevents repeats.

    Args:
        collected: of one step or evaluation.
        limits: that held there.
        where: what was done, for the reader.
    """
    found = {
        **_truncated(collected, limits, where),
        "silent": _silent(collected, where),
        "failures": _failures(collected, where),
        "undecided": _undecided(collected, where),
    }
    return {name: f"caution: {text}" for name, text in found.items() if text}


def endless_warmup(optimizer: AdamW, n_updates: int, where: str) -> dict[str, str]:
    """Caution on a warm-up that takes all updates of a stage or round, by a name that prevents repeats."""
    text = optimizer.endless_warmup(n_updates, where)
    return {f"warm-up of {where}": f"caution: {text}"} if text else {}


def _truncated(collected: RolloutBatch, limits: Limits, where: str) -> dict[str, str]:
    generations = [g for group in collected.groups for t in group.trajectories for g in t.generations]
    cut = [g for g in generations if g.finish is Finish.LENGTH]
    if len(cut) <= TRUNCATED_SHARE * len(generations):
        return {}
    n_full = sum(g.n_tokens < limits.max_tokens for g in cut)
    by = [f"{len(cut) - n_full} by limits.max_tokens: {limits.max_tokens}"] * (n_full < len(cut))
    by += [f"{n_full} by the end of the context (limits.max_context) or a max_tokens of the agent's"] * bool(n_full)
    text = f"{len(cut)} of {len(generations)} generations in {where} were cut before they ended, {' and '.join(by)}"
    if 2 * len(cut) <= len(generations):
        return {"truncated": text}
    advice = "add a reward {kind: overlong} where replies grow ever longer, or raise the limit if they need the room"
    return {"mostly truncated": f"{text}: {advice}"}


def _silent(collected: RolloutBatch, where: str) -> str:
    trajectories = [t for group in collected.groups for t in group.trajectories]
    full = [t for t in trajectories if t.outcome is Outcome.TOKEN_LIMIT and not t.turns]
    if len(full) <= TRUNCATED_SHARE * len(trajectories):
        return ""
    return (
        f"{len(full)} of {len(trajectories)} attempts in {where} ended before the policy could say anything: the "
        "first prompt fills the context: raise policy.max_context or limits.max_context, or shorten agent.system"
    )


def _undecided(collected: RolloutBatch, where: str) -> str:
    trajectories = [t for group in collected.groups for t in group.trajectories]
    n = sum(UNDECIDED in t.detail for t in trajectories)
    if not n:
        return ""
    return (
        f"{n} of {len(trajectories)} attempts in {where} count as unsolved, as {UNDECIDED}: return success=True or "
        "False with terminated=True, or write success_threshold at the reward that says what is solved"
    )


def _failures(collected: RolloutBatch, where: str) -> str:
    n_failed = sum(len(group.failures) for group in collected.groups)
    if not n_failed:
        return ""
    return (
        f"{n_failed} of {collected.n_episodes} attempts in {where} ended with infrastructure errors and are left "
        f"out of everything; the commonest: {commonest_failure(collected.groups)[1]}"
    )
