"""Recipe keys of before the redesign: read under the old name, with a warning that gives the new one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agents.stores.cases import Cases
from rewards.contrib.guides import Subgoals
from rewards.judges.judge import Grade
from rewards.sandbox.container import Container
from rlhf.cli import app
from rlhf.errors import RecipeError, RenamedWarning
from rlhf.recipe.builder import build
from rlhf.recipe.keys import keys_of
from rlhf.recipe.renamed import RENAMED_KEYS
from rlhf.rollout.reward_watch import Watch
from rlhf.training.contrib.node_merging import Merging
from rlhf.training.contrib.reference_reset import ReferenceReset
from rlhf.training.critics.values import Critic
from rlhf.training.stages.policy_gradient import PolicyGradient


@pytest.mark.parametrize(
    ("part", "old", "new"),
    [
        (PolicyGradient, {"trains": ["plan"]}, {"train_roles": ["plan"]}),
        (PolicyGradient, {"relift": {"size": 3}}, {"imitate_failed": {"size": 3}}),
        (PolicyGradient, {"judge_renewal": {"every": 9}}, {"judge_refresh": {"every": 9}}),
        (ReferenceReset, {"kl_above": 0.5}, {"max_kl": 0.5}),
        (Critic, {"trunk": "policy"}, {"backbone": "policy"}),
        (Critic, {"gradient": "trunk"}, {"gradient": "backbone"}),
        (Cases, {"own": True}, {"include_same_task": True}),
        (Grade, {"tries": 2, "url": "http://x", "model": "m"}, {"max_requests": 2, "url": "http://x", "model": "m"}),
        (Watch, {"of": "exact"}, {"compare_with": "exact"}),
        (Merging, {"longest": 3}, {"max_turns": 3}),
        (Container, {"at_once": 2}, {"max_concurrent": 2}),
    ],
)
def test_old_key_is_read_as_the_new_one(part: Any, old: dict[str, Any], new: dict[str, Any], tmp_path: Path) -> None:
    key, name = next(iter(old)), next(iter(new))
    with pytest.warns(RenamedWarning, match=rf"stages\[0\]\.{key}.* is now called"):
        built = build(part, old, "stages[0]", base=tmp_path)
    assert built == build(part, new, "stages[0]", base=tmp_path)
    assert getattr(built, name) is not None


def test_a_key_that_had_no_effect_is_left_out(tmp_path: Path) -> None:
    keys = {"url": "http://x", "model": "m"}
    with pytest.warns(RenamedWarning, match=r"rewards\.a\.show_reference has no effect"):
        built = build(Subgoals, keys | {"show_reference": False}, "rewards.a", base=tmp_path)
    assert built == build(Subgoals, keys, "rewards.a", base=tmp_path)
    assert build(Grade, keys | {"show_reference": True}, "rewards.a", base=tmp_path).show_reference


def test_both_names_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        build(ReferenceReset, {"kl_above": 0.5, "max_kl": 0.4}, "stages[0].reference_reset", base=tmp_path)
    assert caught.value.where == "stages[0].reference_reset.kl_above" and "now called max_kl" in caught.value.hint


def test_command_line_tells_the_new_name() -> None:
    done = CliRunner().invoke(app, ["show", "quickstart", "stages.1.trains=['']"])
    assert done.exit_code == 0, done.output
    assert "stages[1].trains is now called train_roles" in " ".join(done.stderr.split())
    assert "FutureWarning" not in done.stderr and "train_roles" in done.stdout


def test_every_new_key_is_one_that_its_class_has() -> None:
    for named, keys in RENAMED_KEYS.items():
        module, name = named.split(":")
        fields = keys_of(getattr(import_module(module), name))
        assert set(keys.values()) - {None} <= fields.keys() and not keys.keys() & fields.keys(), named
