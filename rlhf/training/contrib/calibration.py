"""Calibration of a model: predicted probabilities against observed frequencies."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.digests import Manifest
from rlhf.errors import DataError, disk
from rlhf.processes import current

if TYPE_CHECKING:
    from rlhf.training.context import RunContext

#: Name of the file beside a reward model that says how it did on tasks that it was not trained on.
HELD_OUT = "held_out.json"


@dataclass(frozen=True, slots=True)
class Bin:
    """Predictions of about the same certainty.

    Attributes:
        n: times that it did.
        said: mean of the probabilities that it gave.
        share: how often it was so.
        low: lower end of the 95% interval of `share`.
        high: upper end of the same.
    """

    n: int
    said: float
    share: float
    low: float
    high: float


def bins_of(
    said: Sequence[float],
    happened: Sequence[bool],
    task_ids: Sequence[str],
    estimate: Callable[[Sequence[bool], Sequence[str]], Any],
    *,
    least: float = 0.0,
    n_bins: int = 5,
) -> list[Bin]:
    """Calibration bins: observed frequency in `n_bins` equal parts of [least, 1], without empty ones.

    Args:
        said: `[N]` probabilities.
        happened: `[N]` whether it was so.
        task_ids: `[N]` the task of each; things of one task are not independent.
        estimate: gives a share with its interval, from what happened and its tasks.
        least: lower end of the first part: 0.5 for how sure a choice between two is.
        n_bins: parts of equal width; a probability on a border belongs to the part above it.

    Raises:
        DataError: lengths differ, or something is said that is no probability from `least` on.
    """
    if not len(said) == len(happened) == len(task_ids) or not all(least - 1e-9 <= p <= 1 + 1e-9 for p in said):
        raise DataError(
            "invalid probabilities or outcomes",
            where="reliability",
            got=f"{len(said)} probabilities, {len(happened)} facts, {len(task_ids)} tasks",
            expected=f"as many of each, and probabilities in [{least:g}, 1]",
        )
    members: list[list[int]] = [[] for _ in range(n_bins)]
    for i, p in enumerate(said):
        # 1e-9: (0.7 - 0.5) / 0.1 is a little less than 2.
        members[min(max(math.floor((p - least) / (1 - least) * n_bins + 1e-9), 0), n_bins - 1)].append(i)
    found = []
    for those in filter(None, members):
        share = estimate([happened[i] for i in those], [task_ids[i] for i in those])
        mean = math.fsum(said[i] for i in those) / len(those)
        found.append(Bin(len(those), mean, share.value, share.low, share.high))
    return found


def calibration_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error: Σ_b n_b/N |said_b − share_b|; 0 where nothing was said.

    Two bins of 3 and 1, .9 said and .6 right, .5 said and 1 right: ¾ · .3 + ¼ · .5 = .35.
    Source: Naeini, Cooper and Hauskrecht, AAAI 2015.
    """
    n = sum(b.n for b in bins)
    return math.fsum(b.n * abs(b.said - b.share) for b in bins) / n if n else 0.0


def sureness(difference: float) -> float:
    """Confidence in a choice from a score difference: σ(|r₁ − r₂|), from ½ to 1."""
    return 1 / (1 + math.exp(-abs(difference)))


def write_held_out(run: Path, name: str, values: dict[str, Any], bins: Sequence[Bin]) -> None:
    """Write held-out figures beside a model in `held_out.json`, which the report draws."""
    if not current().is_main:
        return
    path = run / name / HELD_OUT
    with disk("what the reward model says of other tasks", path):
        text = json.dumps({**values, "bins": [asdict(b) for b in bins]}, indent=1)
        path.write_text(text + "\n", "utf-8")
    Manifest(run).record(path)


def tell_held_out(
    run: RunContext,
    ahead: Sequence[bool],
    task_ids: Sequence[str],
    bins: Sequence[Bin],
    counts: Mapping[str, Any],
    step: int,
    *,
    pairs: str = "pairs",
) -> None:
    """Write, log and print accuracy and calibration of a stage's reward model on held-out pairs.

    Args:
        run: whose stage has trained the model.
        ahead: `[N]` whether the better side of a pair scores higher.
        task_ids: `[N]` the task of each pair.
        bins: calibration on what was held out.
        counts: what else `held_out.json` says.
        step: that it is logged at.
        pairs: what the pairs are, for the reader.
    """
    found, error = run.estimate(ahead, task_ids), calibration_error(bins)
    figures = {"accuracy": found.value, "accuracy_low": found.low, "accuracy_high": found.high}
    figures |= {"calibration_error": error, "n_held_out": float(len(ahead))}
    name = f"reward_model/{run.state.label}"
    write_held_out(run.folder, name, {**counts, **figures}, bins)
    run.log(step, {f"reward_model/{key}": value for key, value in figures.items()}, delivered=False)
    run.progress.say(
        f"the reward model is right on {found.value:.1%} of {len(ahead)} held-out {pairs}, 95% interval "
        f"{found.low:.1%} to {found.high:.1%}, and {error:.1%} off in how sure it is: {run.folder / name}"
    )
