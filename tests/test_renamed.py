"""Recipe keys of before the redesign: read under the old name, with a warning that gives the new one."""

from __future__ import annotations

import re
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agents.stores.cases import Cases
from agents.tools import ToolAgent
from rewards.combinators.combine import Combine
from rewards.contrib.guides import Subgoals
from rewards.judges.judge import Grade
from rewards.sandbox.container import Container
from rlhf.asynchrony.settings import Asynchrony
from rlhf.catalog import CATALOG
from rlhf.cli import app, with_new_options
from rlhf.commands.contrib.stored import tasks_of_folder
from rlhf.errors import RecipeError, RenamedWarning, RlhfError
from rlhf.evaluation.evaluate import Evaluation
from rlhf.gateway.environment import External
from rlhf.recipe import dump, find, load, load_values
from rlhf.recipe.builder import build, build_part, plain_part
from rlhf.recipe.keys import keys_of
from rlhf.recipe.text import overridden, parse, to_text
from rlhf.registry import resolve
from rlhf.renamed import RENAMED_KEYS, RENAMED_KINDS, RENAMED_OF_REWARDS, RENAMED_VALUES, other_names
from rlhf.rollout.limits import Limits
from rlhf.rollout.reward_monitor import RewardMonitor
from rlhf.training.backends.settings import DeepSpeed
from rlhf.training.contrib.node_merging import Merging
from rlhf.training.contrib.reference_reset import ReferenceReset
from rlhf.training.critics.values import Critic
from rlhf.training.policy.lora import Lora
from rlhf.training.stages.policy_gradient import PolicyGradient
from rlhf.training.stages.reward_model import RewardModel
from rlhf.training.stages.supervised import Supervised

PARTS = {"parts": {"a": {"reward": {"kind": "outcome"}}}}


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
        (RewardMonitor, {"of": "exact"}, {"compare_with": "exact"}),
        (Merging, {"longest": 3}, {"max_turns": 3}),
        (Container, {"at_once": 2}, {"max_concurrent": 2}),
        (Evaluation, {"watch_n_tasks": 9}, {"validation_n_tasks": 9}),
        (Limits, {"max_calls": 3}, {"max_generations_per_turn": 3}),
        (Asynchrony, {"schedule": "fixed"}, {"weight_update": "deterministic"}),
        (ToolAgent, {"through": "template"}, {"tool_definitions": "chat_template"}),
        (Supervised, {"attempts": {"rounds": 2}}, {"rejection_sampling": {"rounds": 2}}),
        (PolicyGradient, {"expert": {"per_group": 2}}, {"group_demonstrations": {"per_group": 2}}),
        (Lora, {"targets": ["q_proj"]}, {"target_modules": ["q_proj"]}),
        (DeepSpeed, {"zero": 3}, {"zero_stage": 3}),
        (RewardModel, {"learns": "steps"}, {"objective": "process"}),
        (External, {"world": {"kind": "keyhole"}}, {"environment": {"kind": "keyhole"}}),
        (Combine, {"low": 0.5} | PARTS, {"min_value": 0.5} | PARTS),
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


def test_the_page_of_what_moved_has_every_old_name() -> None:
    page = (Path(__file__).parents[1] / "docs" / "redesign.md").read_text("utf-8")
    tables = (*RENAMED_KEYS.values(), *RENAMED_VALUES.values(), *RENAMED_KINDS.values(), RENAMED_OF_REWARDS)
    # of a value the key stands before it: `gradient: trunk`, of a key that has such values one behind it
    assert not {old for table in tables for old in table if not re.search(rf"[` ]{old}[`:]", page)}


REWARDS = {"right": {"kind": "outcome"}, "audit": {"kind": "called", "tool": "move", "watch": {"window": 9}}}


def test_key_of_every_reward_is_read_under_its_old_name(tmp_path: Path) -> None:
    values = parse(find("quickstart").read_text("utf-8"), "quickstart")
    with pytest.warns(RenamedWarning, match=r"rewards\.audit\.watch is now called monitor"):
        recipe = load_values(values | {"rewards": REWARDS}, name="old", base=tmp_path)
    assert recipe.rewards["audit"].monitor == RewardMonitor(window=9)


@pytest.mark.parametrize(
    ("section", "old", "new"),
    [
        ("environment", {"kind": "processes", "environment": {"kind": "keyhole"}}, "worker_processes"),
        ("sampler", {"kind": "exit"}, "exploratory_iteration"),
        ("selection", {"kind": "uncertain"}, "variance_filter"),
    ],
)
def test_old_kind_is_read_as_the_new_one(section: str, old: dict[str, Any], new: str, tmp_path: Path) -> None:
    with pytest.warns(RenamedWarning, match=rf"part\.kind: {old['kind']} is now called {new}"):
        built = build_part(section, old, "part", base=tmp_path)
    assert plain_part(section, built) == plain_part(
        section, build_part(section, {**old, "kind": new}, "", base=tmp_path)
    )
    assert plain_part(section, built)["kind"] == new


def test_old_key_that_another_kind_has_is_read(tmp_path: Path) -> None:
    with pytest.warns(RenamedWarning, match=r"e\.world is now called environment"):
        made = build_part("environment", {"kind": "external", "world": {"kind": "keyhole"}}, "e", base=tmp_path)
    assert made == build_part(
        "environment", {"kind": "external", "environment": {"kind": "keyhole"}}, "e", base=tmp_path
    )


@pytest.mark.parametrize(
    ("held", "override"),
    [
        ({"watch_n_tasks": 5, "n_tasks": 7}, "evaluation.validation_n_tasks=9"),
        ({"validation_n_tasks": 5, "n_tasks": 7}, "evaluation.watch_n_tasks=9"),
    ],
)
@pytest.mark.filterwarnings("ignore::rlhf.errors.RenamedWarning")
def test_an_override_replaces_a_key_under_its_other_name(held: dict[str, int], override: str) -> None:
    assert build(
        Evaluation, overridden(held, [override.removeprefix("evaluation.")], ""), "", base=Path()
    ) == Evaluation(validation_n_tasks=9, n_tasks=7)


@pytest.mark.filterwarnings("ignore::rlhf.errors.RenamedWarning")
def test_an_override_below_a_key_under_its_old_name_keeps_its_other_values() -> None:
    values = overridden({"rewards": REWARDS}, ["rewards.audit.monitor.stop=true"], "")
    assert values["rewards"]["audit"]["monitor"] == {"window": 9, "stop": True}
    named = overridden({"rewards": {"watch": {"kind": "outcome"}}}, ["rewards.monitor={kind: format}"], "")
    assert set(named["rewards"]) == {"watch", "monitor"}, "names of rewards are the author's"


def test_no_class_has_a_key_beside_its_other_name() -> None:
    for section, kinds in CATALOG.items():
        for kind in kinds:
            try:
                part = resolve(section, kind, base=Path())
            except RlhfError:  # its package is not installed
                continue
            keys = keys_of(part).keys()
            assert not {(key, other) for key in keys for other in other_names(key) if other in keys}, (section, kind)


def test_the_record_of_a_run_is_read_without_a_word_and_what_is_given_with_it_is_not(tmp_path: Path) -> None:
    text = dump(load("quickstart"))
    assert "validation_split" in text and "max_generations_per_turn" in text
    old = text.replace("validation_split", "watch_split").replace("max_generations_per_turn", "max_calls")
    (tmp_path / "recipe.yaml").write_text(old, "utf-8")

    def said(*overrides: str) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load(tmp_path, overrides)
        return [str(one.message).partition(" ")[0] for one in caught if issubclass(one.category, RenamedWarning)]

    names = ["evaluation.watch_split", "limits.max_calls"]
    assert sorted(said()) == names, "a recipe of one's own may be called recipe.yaml too"
    (tmp_path / "versions.json").write_text("{}")
    assert load(tmp_path) == load("quickstart")
    assert said() == said("evaluation.n_tasks=3", "limits.max_turns=4") == []
    assert said("limits.max_calls=9") == names[1:]
    assert said("stages.1.trains=['']") == ["stages[1].trains"]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("tune --keep=4 --help", "tune --reduction-factor=4 --help"),
        ("score --passes 0.7 --help", "score --threshold 0.7 --help"),
        ("evaluate --also-trained --help", "evaluate --allow-overlap --help"),
        ("gateway --reward world --help", "gateway --reward=environment --help"),
    ],
)
def test_old_option_is_read_as_the_new_one(given: str, read: str) -> None:
    assert with_new_options(given.split()) == read.split()
    assert with_new_options(read.split()) == read.split()
    done = CliRunner().invoke(app, given.split())
    assert done.exit_code == 0 and "is now called" in done.stderr, done.output


def test_tasks_of_an_older_run_are_made_of_its_validation_split_too(tmp_path: Path) -> None:
    recipe = {
        "environment": {"kind": "bandit"},
        "evaluation": {"split": "train", "watch_split": "test"},
        "stages": [{"kind": "supervised"}],
    }
    (tmp_path / "recipe.yaml").write_text(to_text(recipe), "utf-8")
    tasks, problem = tasks_of_folder(tmp_path)
    assert not problem and {name.split("/")[-2] for name in tasks} == {"train", "test"}
