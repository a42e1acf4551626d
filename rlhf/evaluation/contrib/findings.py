"""Findings of a run report: quiet failures, looked for in its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from rlhf.errors import RlhfError
from rlhf.evaluation.paired import Paired, compare
from rlhf.evaluation.run_data import RunData
from rlhf.evaluation.store import read_successes
from rlhf.evaluation.wording import number_text, percent_text

Level = Literal["fine", "look", "problem"]
#: Name of the finding that leads, whatever it says.
TRAINER_AND_ENGINE = "Trainer and engine"


@dataclass(frozen=True, slots=True)
class Finding:
    """Figure that shows whether a run can be trusted.

    Attributes:
        name: what is looked at.
        value: the figure, for reading.
        level: `fine`; `look`, worth a look; `problem`, results may mean nothing.
        words: what the figure says.
        hint: what to do about it; empty where it is fine.
    """

    name: str
    value: str
    level: Level
    words: str
    hint: str = ""


def findings(run: RunData, problem: Callable[[str], object]) -> list[Finding]:
    """Look for quiet failures; what the run did not log is not reported on.

    Args:
        run: that is looked at.
        problem: takes the name of a check that could not be made, and why; the others are made all the same.
    """
    checks = (
        *(_gap, _effective, _truncated, _errors, _invalid, _signal, _collapse, _monitored, _limits, _updates, _finite),
        *(_refreshed, _refreshed_judge, _changed, _chance),
    )
    found = list[Finding]()
    for check in checks:
        try:
            found += check(run)
        except (RlhfError, OSError, ValueError, ArithmeticError, LookupError, TypeError) as error:
            problem(f"the check {check.__name__.strip('_')} could not be made: {error}")
    return found


def _gap(run: RunData) -> Iterator[Finding]:
    means, peaks = run.values("loss/sampler_logprob_diff_mean"), run.values("loss/sampler_logprob_diff_max")
    if not means:
        return
    worst = max(means)
    level = _level(worst, look=0.02, problem=0.1)
    hint = "see whether temperature, precision and chat template agree between engine and trainer"
    peak = f", at most {number_text(max(peaks))} on one token" if peaks else ""
    yield Finding(
        TRAINER_AND_ENGINE,
        f"{number_text(worst)} nats",
        level,
        f"Mean difference of the log-probs that trainer and engine give to the same tokens, in the worst step{peak}.",
        hint if level != "fine" else "",
    )


def _effective(run: RunData) -> Iterator[Finding]:
    shares = run.values("loss/sampler_ess")
    if not shares or (worst := min(shares)) > 0.8:
        return
    left_out = max(run.values("loss/sampler_rejected_share"), default=0.0)
    yield Finding(
        "Effective sample size",
        percent_text(worst),
        "problem" if worst <= 0.3 else "look",
        "Effective share of the tokens after the correction for the difference of trainer and engine, in the worst "
        f"step; up to {percent_text(left_out)} of the tokens of a step were rejected.",
        "bring engine and trainer nearer (precision, fresher weights), or choose a milder `correction`",
    )


def _truncated(run: RunData) -> Iterator[Finding]:
    cut, calls = sum(run.values("rollout/n_truncated_generations")), sum(run.values("rollout/n_generations"))
    if not calls:
        return
    share = cut / calls
    now = run.setting("limits.max_tokens")
    yield Finding(
        "Cut generations",
        percent_text(share),
        _level(share, look=0.005, problem=0.05),
        f"{cut:.0f} of {calls:.0f} generations were cut by the limit on new tokens.",
        f"raise limits.max_tokens{f' (now {now})' if now is not None else ''}" if cut else "",
    )


def _errors(run: RunData) -> Iterator[Finding]:
    failed, attempts = sum(run.values("rollout/n_infra_errors")), sum(run.values("rollout/n_episodes"))
    failed_eval = sum(int(result.get("n_errors") or 0) for result in run.results.values())
    if not attempts and not run.results:
        return
    share = failed / attempts if attempts else 0.0
    level = _level(share, look=1e-9, problem=0.05)
    yield Finding(
        "Failed parts",
        percent_text(share),
        "look" if level == "fine" and failed_eval else level,
        f"{failed:.0f} attempts in training and {failed_eval} in evaluation ended with an infrastructure error "
        "(environment, agent, engine, reward, time limit). They are neither scored nor trained on.",
        "read their messages below" if failed or failed_eval else "",
    )


def _invalid(run: RunData) -> Iterator[Finding]:
    if not (shares := run.values("rollout/invalid_share")):
        return
    last = _mean(shares[-_quarter(shares) :])
    yield Finding(
        "Invalid actions",
        percent_text(last),
        _level(last, look=0.1, problem=0.5),
        "Turns whose action could not be read or was not understood, in the last quarter of training.",
        "show the admissible actions (agent), or demonstrate the format first" if last >= 0.1 else "",
    )


def _signal(run: RunData) -> Iterator[Finding]:
    flat = sum(run.values("credit/n_zero_std_groups")) + sum(run.values("credit/n_singleton_groups"))
    groups = sum(run.values("credit/n_groups"))
    if not groups:
        return
    share = flat / groups
    yield Finding(
        "Groups without signal",
        percent_text(share),
        _level(share, look=0.3, problem=0.9),
        "Groups whose trajectories all scored the same: nothing is learned from comparing them.",
        "choose tasks nearer to the policy's ability, or a larger group_size" if share >= 0.3 else "",
    )


def _collapse(run: RunData) -> Iterator[Finding]:
    trapped = run.values("collapse/echo_trap")
    if any(trapped):
        yield Finding(
            "Echo trap",
            f"{sum(trapped):.0f} of {len(trapped)} steps",
            "problem",
            "Scores within groups became equal, entropy fell, and the return fell, all in the same steps.",
            "go back to an earlier checkpoint with a lower optimizer.lr, a wider loss.clip_high, or a KL term",
        )


def _monitored(run: RunData) -> Iterator[Finding]:
    for name in run.names("monitor/"):
        monitored, gaps = run.values(f"monitor/{name}"), run.values(f"monitor_gap/{name}")
        if not monitored:  # it could score no attempt
            continue
        curves = run.curves(f"monitor_alarm/{name}")
        alarms = [(c.stage, step) for c in curves for step, v in zip(c.steps, c.values, strict=True) if v]
        n = _quarter(monitored)
        trained = [x + y for x, y in zip(monitored, gaps, strict=True)]
        ends = [(_mean(values[:n]), _mean(values[-n:])) for values in (trained, monitored)]
        (trained_first, trained_last), (first, last) = ends
        keys = ("monitor.compare_with", "watch.compare_with", "watch.of")  # the others are how older runs have it
        what = next((found for key in keys if (found := run.setting(f"rewards.{name}.{key}"))), None)
        yield Finding(
            f"Monitored reward {name}",
            f"alarm at {len(alarms)} of {len(monitored)} steps" if alarms else "no alarm",
            "problem" if alarms else "fine",
            f"From the first quarter of training to the last, {f'the reward {what}' if what else 'the score'} went "
            f"from {number_text(trained_first)} to {number_text(trained_last)}, and {name}, which is not trained on, "
            f"from {number_text(first)} to {number_text(last)}."
            + (
                f" The first rose while the second fell, first at step {alarms[0][1]} of {alarms[0][0]}."
                if alarms
                else ""
            ),
            "read attempts that the trained reward likes and this one does not; use a checkpoint from before that step"
            if alarms
            else "",
        )


def _refreshed(run: RunData) -> Iterator[Finding]:
    before, after = run.values("reward_refresh/accuracy_before"), run.values("reward_refresh/accuracy_after")
    if not before:
        return
    low = run.values("reward_refresh/accuracy_after_low")[-1]
    yield Finding(
        "Reward model that was trained further",
        percent_text(after[-1]),
        "look" if low <= 0.5 else "fine",
        f"Pairs of held-out attempts of the present policy that it ranks rightly: {percent_text(before[0])} before the "
        f"first of {len(before)} times and {percent_text(after[-1])}, at least {percent_text(low)}, after the last.",
        "it may be no better than chance: hold out more, or make more attempts between two times" if low <= 0.5 else "",
    )


def _refreshed_judge(run: RunData) -> Iterator[Finding]:
    accuracies = run.values("judge_refresh/audit_accuracy")
    if not accuracies:
        return
    is_over = any(run.values("judge_refresh/audit_failed"))
    yield Finding(
        "Judge that was refreshed",
        percent_text(accuracies[-1]),
        "problem" if is_over else "fine",
        f"Audited pairs of which a judge prefers the right attempt: {percent_text(accuracies[0])} of the first and "
        f"{percent_text(accuracies[-1])} of the last of {len(accuracies)} that were audited."
        + (" That one failed, so the judge before it stayed." if is_over else ""),
        "read what it prefers, use another judge model, and compare with the monitored reward" if is_over else "",
    )


def _limits(run: RunData) -> Iterator[Finding]:
    attempts = sum(run.values("rollout/n_episodes"))
    for metric, key, name in (
        ("rollout/n_turn_limit", "limits.max_turns", "Episodes cut by the turn limit"),
        ("rollout/n_token_limit", "limits.max_context", "Episodes cut by a full context"),
    ):
        counts = run.values(metric)
        recent = sum(counts[-_quarter(counts) :]) if counts else 0.0
        episodes = run.values("rollout/n_episodes")
        share = recent / (sum(episodes[-_quarter(episodes) :]) or 1.0) if attempts else 0.0
        if share >= 0.2:
            now = run.setting(key)
            yield Finding(
                name,
                percent_text(share),
                "look",
                "Share of the episodes in the last quarter of training that a limit ended, not the environment.",
                f"see whether {key}{f' ({now})' if now is not None else ''} leaves room to finish",
            )


def _updates(run: RunData) -> Iterator[Finding]:
    skipped, done = run.values("optimizer/n_skipped"), run.values("optimizer/n_updates")
    if sum(skipped) > 0:
        yield Finding(
            "Skipped updates",
            f"{sum(skipped):.0f}",
            "look",
            "Updates left out because the gradient was not finite.",
            "lower optimizer.lr, or look for extreme rewards",
        )
    if done and max(done) == 0:
        yield Finding(
            "No updates",
            "0",
            "problem",
            "The policy was never changed: every step was left with nothing to train on.",
            "look at the groups without signal and at the filters",
        )


def _finite(run: RunData) -> Iterator[Finding]:
    names = sorted({name for line in run.lines for name, value in line.values.items() if value is None})
    if names:
        yield Finding(
            "Values that are not finite",
            str(len(names)),
            "problem",
            f"These metrics were NaN or infinite at least once: {', '.join(names)}.",
            "lower optimizer.lr, or look for extreme rewards",
        )


def _changed(run: RunData) -> Iterator[Finding]:
    if run.changes:
        yield Finding(
            "Recipe changed in mid-run",
            str(len(run.changes)),
            "look",
            f"{'; '.join(change.text for change in run.changes)}.",
            "recipe.yaml holds the last values: training it anew gives another run, unless only steps changed",
        )


def _chance(run: RunData) -> Iterator[Finding]:
    """Significance of the change from first to last evaluation: paired, else by overlap of intervals."""
    points = list(run.results.values())
    if len(points) < 2:
        return
    hint = "evaluate on more tasks (evaluation.n_tasks), or train longer"
    if (pair := compared(run)) is not None:
        low, high, n = pair.difference.low, pair.difference.high, pair.difference.n
        if low <= 0 <= high:
            title = "Borderline change" if pair.p_value < 0.05 else "No clear change"
            words = f"Task by task, success changed by {100 * low:+.1f} to {100 * high:+.1f} points: it may be chance."
            yield Finding(title, f"n = {n}, p = {pair.p_value:.2g}", "look", words, hint)
        return
    first, last = points[0], points[-1]
    if last["low"] <= first["high"] and first["low"] <= last["high"]:
        words = "The intervals before and after overlap: the difference may be chance."
        yield Finding("Intervals overlap", f"n = {last.get('n', 0)}", "look", words, hint)


def compared(run: RunData) -> Paired | None:
    """Paired comparison of first and last evaluation; None with fewer than two common tasks."""
    names, folder = list(run.results), run.folder / "trajectories"
    if len(names) < 2:
        return None
    first, last = (read_successes(folder, stage=name) for name in (names[0], names[-1]))
    if len([task for task in first if first[task] and last.get(task)]) < 2:
        return None
    return compare(first, last)


def _level(value: float, *, look: float, problem: float) -> Level:
    return "problem" if value >= problem else "look" if value >= look else "fine"


def _quarter(values: list[float]) -> int:
    return max(1, len(values) // 4)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
