"""`rlhf check recipe` tries estimators and losses of one's own on a made-up step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf.build.algorithm_trial import _tried_advantage, _tried_loss, own_algorithms
from rlhf.catalog import CATALOG
from rlhf.credit.estimator import needs_branches
from rlhf.recipe import load
from rlhf.recipe.builder import build_part
from tests import recipe_parts
from tests.commands import run
from tests.credit.credit_groups import estimators
from tests.test_catalog import NEEDED

OWN = '''
import math
from dataclasses import dataclass

from rlhf.credit.grpo import GRPO
from rlhf.data import Credit
from rlhf.losses.policy_loss import LossOutput


@dataclass(frozen=True)
class Standardised:
    """Scores over their standard deviation, which may be 0."""

    needs_values = False
    min_group = 2

    def __call__(self, group, values=None):
        totals = [score.total for score in group.scores]
        mean = sum(totals) / len(totals)
        std = math.sqrt(sum((x - mean) ** 2 for x in totals) / len(totals))
        found = [(x - mean) / std if std else math.nan for x in totals]
        tokens = [[(x,) * g.n_tokens for g in t.generations] for t, x in zip(group.trajectories, found)]
        return Credit(tuple(map(tuple, tokens)))


@dataclass(frozen=True)
class Named(GRPO):
    def __call__(self, group, values=None):
        assert set(group.scores[0].parts) == {"right"}
        return Credit(super().__call__(group, values).advantages_GNT, {"n_long": 1.0})


@dataclass(frozen=True)
class Plain:
    def __call__(self, inputs):
        return LossOutput((-inputs.weights * inputs.advantages * inputs.policy_logprobs).sum())


@dataclass(frozen=True)
class PerToken(Plain):
    def __call__(self, inputs):
        return LossOutput(inputs.weights * inputs.policy_logprobs)


@dataclass(frozen=True)
class Detached(Plain):
    def __call__(self, inputs):
        return LossOutput(super().__call__(inputs).loss.detach())


@dataclass(frozen=True)
class Bare(Plain):
    def __call__(self, inputs):
        return super().__call__(inputs).loss


@dataclass(frozen=True)
class Referring(Plain):
    needs_ref = True

    def __call__(self, inputs):
        return LossOutput((inputs.weights * (inputs.policy_logprobs - inputs.ref_logprobs)).sum())


@dataclass(frozen=True)
class Unasked(Plain):
    def __call__(self, inputs):
        return LossOutput((inputs.weights * (inputs.policy_logprobs - inputs.ref_logprobs)).sum())
'''
FINITE = "advantage: a finite number for each sampled token of "


@pytest.mark.parametrize(
    ("key", "name", "broken", "detail"),
    [
        ("advantage", "Standardised", f"{FINITE}attempts of equal scores", "Standardised, alike: credit is not finite"),
        ("advantage", "Named", "advantage: its metrics can be logged", "no such metric; got: 'n_long'"),
        ("loss", "PerToken", "loss: is a finite scalar tensor", "tensor(["),
        ("loss", "Detached", "loss: can be differentiated", "does not require grad"),
        ("loss", "Bare", "loss: gives a LossOutput", "tensor("),
        ("loss", "Unasked", "loss: raises nothing", "TypeError: unsupported operand"),
        ("loss", "Plain", "", ""),
        ("loss", "Referring", "", ""),
    ],
)
def test_an_algorithm_of_ones_own_is_tried(tmp_path: Path, key: str, name: str, broken: str, detail: str) -> None:
    echo = recipe_parts.write(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    result = run("check", "recipe", echo, "agent={kind: chat}", f"stages.1.{key}={{kind: ./own.py:{name}}}", "--json")
    reports = {report["subject"]: report for report in json.loads(result.stdout.splitlines()[-1])["reports"]}
    found = reports[f"stages[1].{key} ({name})"]
    wrong = {one["promise"]: one["detail"] for one in found["findings"] if not one["ok"]}
    assert (result.exit_code, found["ok"]) == ((2, False) if broken else (0, True))
    assert list(wrong)[:1] == [broken] * bool(broken) and detail in wrong.get(broken, "")


def test_one_within_another_is_tried_and_those_of_the_catalogue_are_not(tmp_path: Path) -> None:
    echo = recipe_parts.write(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    assert list(own_algorithms(load(echo))) == []
    [report] = own_algorithms(
        load(echo, ["stages.1.advantage={kind: task_normalised, inner: {kind: ./own.py:Standardised}}"])
    )
    assert report.subject == "stages[1].advantage (TaskNormalised)" and not report.ok


ESTIMATORS = estimators()


@pytest.mark.parametrize("kind", [kind for kind, one in ESTIMATORS.items() if not needs_branches(one)])
def test_each_estimator_of_the_catalogue_passes(kind: str) -> None:
    report = _tried_advantage("advantage", ESTIMATORS[kind], ["steps"], 4)
    assert report.ok, str(report)


@pytest.mark.parametrize("kind", CATALOG["loss"])
def test_each_loss_of_the_catalogue_passes(kind: str) -> None:
    loss = build_part("loss", {"kind": kind, **NEEDED.get(("loss", kind), {})}, "loss", base=Path())
    report = _tried_loss("loss", loss)
    assert report.ok, str(report)
