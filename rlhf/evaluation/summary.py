"""Summary of an evaluation: every figure of its report, from the attempts alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.data import Outcome
from rlhf.evaluation.attempts import Attempt, scores_by_task, solved_by_task
from rlhf.evaluation.passes import pass_estimates
from rlhf.evaluation.statistics import Estimate, mean_interval, success_estimate, usual_range

#: Ends that came from a limit: counted apart, and failures all the same.
_CUT = (Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT)


def summarize(
    attempts: Sequence[Attempt],
    *,
    price_in: float | None = None,
    price_out: float | None = None,
    by: Mapping[str, Mapping[str, str]] | None = None,
) -> Any:
    """Return the figures of `attempts` as plain values.

    Args:
        attempts: of one evaluation.
        price_in: money for a million tokens read; without prices no cost is given.
        price_out: money for a million tokens sampled.
        by: column -> task -> group, as `groups_by` returns them; figures of each group are given in their order.
    """
    types = _grouped(attempts, lambda a: a.type)
    parts = _grouped(attempts, lambda a: a.part)
    return {
        **_figures(attempts),
        "if_errors_failed": _plain(_success(attempts, errors_fail=True)),
        "pass": _passes(attempts),
        "per_solved": _per_solved(attempts, price_in, price_out),
        **_of_candidates(attempts),
        "parts": {name: _figures(found) for name, found in parts.items()},
        "types": {name: _figures(found) for name, found in types.items()},
        **({"by": {column: _by(attempts, groups) for column, groups in by.items()}} if by else {}),
    }


def _by(attempts: Sequence[Attempt], groups: Mapping[str, str]) -> dict[str, Any]:
    """Figures of each group, in the order of `groups`, task -> group; those without an attempt are left out."""
    found = _grouped(attempts, lambda a: groups[a.task_id])
    return {name: _figures(found[name]) for name in dict.fromkeys(groups.values()) if name in found}


def _figures(attempts: Sequence[Attempt]) -> dict[str, Any]:
    counted = [a for a in attempts if not a.is_error]
    n = max(len(counted), 1)
    outcomes = Counter(a.outcome for a in attempts)
    scores = scores_by_task(attempts)
    values = [value for found in scores.values() for value in found]
    tasks = [task for task, found in scores.items() for _ in found]
    return {
        "success": _plain(_success(attempts, errors_fail=False)),
        "score": _plain(mean_interval(values, tasks, within=usual_range(values))),
        "rewards": _rewards(counted),
        "n_tasks": len({a.task_id for a in attempts}),
        "n_attempts": len(attempts),
        "n_solved": outcomes[Outcome.SOLVED],
        "n_failed": outcomes[Outcome.FAILED],
        "truncated": _truncated(counted),
        **{key: sum(getattr(a, key) for a in counted) for key in ("n_replies", "n_cut_replies", "n_empty_replies")},
        "n_prompt_too_long": sum(a.outcome is Outcome.TOKEN_LIMIT and a.n_turns == a.n_tokens == 0 for a in counted),
        "errors": {str(o): outcomes[o] for o in Outcome if o.is_infrastructure_error},
        "n_errors": len(attempts) - len(counted),
        "n_retries": sum(a.n_retries for a in attempts),
        "turns_mean": sum(a.n_turns for a in counted) / n,
        "invalid_share": sum(a.n_invalid for a in counted) / max(sum(a.n_turns for a in counted), 1),
        "tokens_mean": sum(a.n_tokens for a in counted) / n,
    }


def _rewards(attempts: Sequence[Attempt]) -> dict[str, dict[str, Any]]:
    """Mean of each reward by its name, unweighted, over the attempts that it has judged."""
    found: dict[str, list[tuple[str, float]]] = {}
    for a in attempts:
        for name, value in a.rewards:
            found.setdefault(name, []).append((a.task_id, value))
    means = {}
    for name, pairs in found.items():
        values = [value for _, value in pairs]
        means[name] = _plain(mean_interval(values, [task for task, _ in pairs], within=usual_range(values)))
    return means


def _truncated(attempts: Sequence[Attempt]) -> dict[str, int]:
    """Attempts by the limit that ended them; `reply_limit` where the turns ran out with a reply that was cut."""
    is_reply = [a.outcome is Outcome.TURN_LIMIT and a.was_cut for a in attempts]
    ends = Counter(a.outcome for a, cut in zip(attempts, is_reply, strict=True) if not cut)
    return {"reply_limit": sum(is_reply)} | {str(outcome): ends[outcome] for outcome in _CUT}


def _success(attempts: Sequence[Attempt], *, errors_fail: bool) -> Estimate:
    """Share of solved attempts; errors are left out, or counted as failures."""
    counted = [a for a in attempts if errors_fail or not a.is_error]
    n_errors = sum(a.is_error for a in attempts)
    return success_estimate([a.solved for a in counted], [a.task_id for a in counted], n_errors=n_errors)


def _passes(attempts: Sequence[Attempt]) -> dict[str, dict[str, Any]]:
    """pass@k and pass^k for k = 1, 2, 4, ..., and their number of attempts, over tasks with at least k."""
    solved = solved_by_task(attempts)
    most = max((len(found) for found in solved.values()), default=0)
    found: dict[str, dict[str, Any]] = {}
    for k in sorted({1 << i for i in range(most.bit_length()) if 1 << i <= most} | ({most} if most else set())):
        at, every = pass_estimates(solved, k)
        found[str(k)] = {"at": _plain(at), "all": _plain(every)}
    return found


def _per_solved(attempts: Sequence[Attempt], price_in: float | None, price_out: float | None) -> dict[str, Any]:
    """Cost per solved attempt, failed ones included; None where none was solved."""
    counted = [a for a in attempts if not a.is_error]
    n = sum(a.solved for a in counted)
    spent: dict[str, float] = {
        "turns": float(sum(a.n_turns if a.n_spent_turns is None else a.n_spent_turns for a in counted)),
        "tokens": float(sum(a.n_tokens for a in counted)),
        "prompt_tokens": float(sum(a.n_prompt_tokens for a in counted)),
    }
    if price_in is not None or price_out is not None:
        spent["cost"] = (spent["prompt_tokens"] * (price_in or 0) + spent["tokens"] * (price_out or 0)) / 1e6
    return {name: value / n if n else None for name, value in spent.items()}


def _of_candidates(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Candidates per attempt, and how often one of them was solved; empty without any."""
    counted = [a for a in attempts if not a.is_error]
    if all(a.n_candidates == 1 for a in counted):
        return {}
    found = success_estimate([a.any_solved for a in counted], [a.task_id for a in counted])
    return {"candidates_mean": sum(a.n_candidates for a in counted) / len(counted), "any_candidate": _plain(found)}


def _grouped(attempts: Sequence[Attempt], key: Any) -> Mapping[str, list[Attempt]]:
    found: dict[str, list[Attempt]] = {}
    for a in attempts:
        found.setdefault(key(a), []).append(a)
    return found


def _plain(estimate: Estimate) -> dict[str, Any]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "n": estimate.n}
