"""Keys of other toolkits are answered with ours, and ours are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.asynchrony.settings import Asynchrony
from rlhf.catalog import CATALOG
from rlhf.errors import MissingPackageError, RecipeError
from rlhf.evaluation.evaluate import Evaluation
from rlhf.recipe import load
from rlhf.recipe.aliases import ALIASES, IN_OTHER_STAGES, alias_hint
from rlhf.recipe.keys import is_settings, keys_of, without_none
from rlhf.recipe.places import KEYS, NESTED_KEYS
from rlhf.registry import resolve
from rlhf.rollout.limits import Limits


def every_key() -> set[str]:
    """Of recipes, of all kinds, and of the settings in them."""
    found, todo = {*KEYS, "kind"}, [Limits, Evaluation, Asynchrony]
    for section, kinds in CATALOG.items():
        for kind in kinds:
            try:
                todo.append(resolve(section, kind, base=Path()))
            except (MissingPackageError, RecipeError):
                continue
    seen: list[object] = []
    while todo:
        cls = todo.pop()
        if cls in seen or not (is_settings(cls) or isinstance(cls, type)):
            continue
        seen.append(cls)
        for name, key in keys_of(cls).items():
            found.add(name)
            todo.append(without_none(key.annotation))
    return found


def test_what_is_answered_is_there() -> None:
    known = every_key()
    others = (key for keys in IN_OTHER_STAGES.values() for key in keys)
    parts = {part for path in (*ALIASES.values(), *NESTED_KEYS.values(), *others) for part in path.split(".")} - {
        "N",
        "NAME",
    }
    assert parts <= known, parts - known


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("stages.1.learning_rate=1e-4", "stages.N.optimizer.lr"),
        ("stages.1.optimizer.learning_rate=1e-4", "stages.N.optimizer.lr"),
        ("learning_rate=1e-4", "stages.N.optimizer.lr"),
        ("stages.1.per_device_train_batch_size=4", "stages.N.tasks_per_step"),
        ("stages.1.num_generations=4", "stages.N.group_size"),
        ("stages.1.beta=0.1", "stages.N.loss.kl_coef"),
        ("stages.1.loss.epsilon=0.1", "stages.N.loss.clip_low"),
        ("limits.max_completion_length=9", "limits.max_tokens"),
        ("max_completion_length=9", "limits.max_tokens"),
        ("stages.1.gradient_accumulation_steps=2", "stages.N.minibatches"),
        ("stages.1.num_train_epochs=2", "stages.N.steps"),
        ("stages.0.num_train_epochs=2", "stages.N.epochs"),
        ("stages.1.num_iterations=2", "stages.N.epochs"),
        ("stages.1.batch_size=4", "stages.N.tasks_per_step"),
        ("batch_size=4", "stages.N.tasks_per_step"),
        ("stages.0.per_device_train_batch_size=4", "stages.N.batch_size here, what one update"),
        ("stages.0.gradient_accumulation_steps=4", "stages.N.max_tokens_per_microbatch here"),
        ("stages.0.num_generations=4", "stages.N.rejection_sampling.group_size"),
        ("stages.0.max_steps=4", "stages.N.epochs"),
        ("stages.0.beta=0.1", "policy_gradient stages only"),
        ("stages.0.clip_eps=0.1", "policy_gradient stages only"),
        ("stages.1.clip_eps=0.1", "stages.N.loss.clip_low"),
        ("stages.1.max_prompt_length=9", "limits.max_context here, which is the prompt and the generation"),
        ("stages.1.scale_rewards=false", "stages.N.advantage.normalize_std"),
        ("use_wandb=true", "trackers: [{kind: wandb, project: NAME}]"),
        ("stages.1.ppo_mini_batch_size=2", "stages.N.minibatches"),
        ("stages.1.n_samples_per_prompt=2", "stages.N.group_size"),
        ("policy.model_name_or_path=x", "policy.path"),
    ],
)
def test_a_key_of_another_toolkit_is_answered_with_ours(override: str, answer: str) -> None:
    with pytest.raises(RecipeError) as error:
        load("quickstart", [override])
    assert answer in error.value.hint and "other toolkits" in error.value.hint


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("lr=1e-4", "it is a key of a stage's optimizer: stages.N.optimizer.lr, N counted from 0"),
        ("warmup_steps=4", "stages.N.optimizer.warmup_steps"),
        ("kl_coef=0.1", "it is a key of a stage's loss: stages.N.loss.kl_coef"),
        ("steps=4", "it is a key of a stage: stages.N.steps"),
        ("max_turns=4", "it is a key of limits: limits.max_turns"),
        ("stages.1.warmup_steps=4", "it is a key of optimizer: write optimizer: {..., warmup_steps: ...}"),
        ("stages.1.kl_coef=0.1", "it is a key of loss: write loss: {..., kl_coef: ...}"),
        ("stages.1.lora={rank: 4}", "it is a key of policy: policy.lora"),
        ("stages.1.seed=1", "it is a key of the recipe: write seed: ... at its top"),
        ("policy.seed=1", "it is a key of the recipe: write seed: ... at its top"),
        ("output_dir=runs/a", "rlhf train RECIPE --out FOLDER"),
        ("num_gpus=2", "rlhf train RECIPE --nproc N"),
        ("stages.1.top_p=0.9", "sampled from the full softmax"),
        ("stages.1={kind: preference, kl_coef: 0.2}", "stages.N.beta"),
    ],
)
def test_a_key_in_another_place_is_shown_to_its_own(override: str, answer: str) -> None:
    with pytest.raises(RecipeError) as error:
        load("quickstart", [override])
    assert answer in error.value.hint


def test_a_key_of_nobody_is_not() -> None:
    assert alias_hint("sparkle") == ""


def test_a_path_of_an_environment_is_read_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `./file.py` in a kind is, wherever the command is run; what is only in the present folder is found there."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "recipes" / "words.txt").write_text("beside")
    (tmp_path / "elsewhere" / "here.txt").write_text("here")
    (tmp_path / "recipes" / "world.py").write_text(
        """
from pathlib import Path

from pydantic.dataclasses import dataclass

from environments.contrib.bandit import Bandit


@dataclass(frozen=True, kw_only=True)
class World(Bandit):
    words: Path | None = None
"""
    )
    from rlhf.recipe.builder import build_part

    monkeypatch.chdir(tmp_path / "elsewhere")
    for given, wanted in (
        ("./words.txt", tmp_path / "recipes" / "words.txt"),
        ("words.txt", tmp_path / "recipes" / "words.txt"),
        ("here.txt", tmp_path / "elsewhere" / "here.txt"),
        (str(tmp_path / "elsewhere" / "here.txt"), tmp_path / "elsewhere" / "here.txt"),
        ("nowhere.txt", Path("nowhere.txt")),
    ):
        values = {"kind": "./world.py:World", "words": given}
        assert build_part("environment", values, "environment", base=tmp_path / "recipes").words == wanted
