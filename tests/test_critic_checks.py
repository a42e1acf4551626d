"""Critics and the settings around them: what is refused and what is doubted before anything loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.errors import RecipeError
from rlhf.recipe import load
from rlhf.recipe.checks import cautions

GAE = "stages.1.advantage={kind: gae}"
ARCHER = "stages.1.advantage={kind: archer}"
SWEET = "stages.1.advantage={kind: sweet}"
PROGRESS = "stages.1.advantage={kind: progress, contributions: critic}"


def test_an_estimator_that_needs_a_critic_gets_one_by_a_key(echo: Path) -> None:
    for kind in ("gae", "turn_gae", "bilevel_gae"):
        with pytest.raises(RecipeError) as error:
            load(echo, [f"stages.1.advantage={{kind: {kind}}}"])
        assert error.value.where == "stages[1].advantage.kind" and error.value.got == kind
        assert "stages[1].critic" in error.value.expected and "critic: {}" in error.value.hint
        critic = load(echo, [f"stages.1.advantage={{kind: {kind}}}", "stages.1.critic={}"]).stages[1].critic
        assert critic.backbone == "own" and critic.trains_backbone
    inner = "stages.1.advantage={kind: task_normalised, inner: {kind: gae}}"
    with pytest.raises(RecipeError) as error:
        load(echo, [inner])
    assert error.value.where == "stages[1].advantage.inner.kind"
    assert load(echo, [inner, "stages.1.critic={backbone: policy}"]).stages[1].critic.trains_backbone is False


def test_an_estimator_of_turns_gets_a_critic_of_turns(echo: Path) -> None:
    with pytest.raises(RecipeError) as error:
        load(echo, [ARCHER])
    assert error.value.where == "stages[1].advantage.kind" and "critic: {kind: archer}" in error.value.hint
    with pytest.raises(RecipeError) as error:
        load(echo, [ARCHER, "stages.1.critic={}"])
    assert error.value.got == "values for archer" and "write critic: {kind: archer}" in error.value.hint
    assert "gae or turn_gae or bilevel_gae" in error.value.hint
    with pytest.raises(RecipeError) as error:
        load(echo, [ARCHER, "stages.1.critic={kind: archr}"])
    assert "did you mean 'archer'?" in error.value.hint
    with pytest.raises(RecipeError) as error:
        load(echo, [PROGRESS])
    assert error.value.where == "stages[1].advantage.kind" and "critic: {kind: contributions}" in error.value.hint
    assert load(echo, [PROGRESS, "stages.1.critic={kind: contributions, warmup_steps: 1}"]).stages[1].critic.frozen
    inner = "stages.1.advantage={kind: task_normalised, inner: {kind: archer}}"
    with pytest.raises(RecipeError) as error:
        load(echo, [inner, "stages.1.critic={}"])
    assert error.value.where == "stages[1].critic.kind" and error.value.expected == "archer"
    critic = load(echo, [inner, "stages.1.critic={kind: archer}"]).stages[1].critic
    assert (critic.tau, critic.gamma, critic.trains_backbone) == (0.1, 0.95, True)


@pytest.mark.parametrize(
    ("overrides", "where", "expected"),
    [
        (["stages.1.critic={}"], "stages[1].critic", "grpo compares with no values"),
        ([GAE, "stages.1.critic={warmup_steps: 3}"], "stages[1].critic.warmup_steps", "less than steps = 3"),
        ([GAE, "stages.1.critic={path: ./nowhere}"], "stages[1].critic.path", "config.json"),
        ([GAE, "stages.1.critic={optimizer: {min_lr_ratio: 0.1}}"], "stages[1].critic.optimizer.min_lr_ratio",
         "constant"),
        ([GAE, "stages.1.critic={backbone: policy, lora: {}}"], "stages[1].critic", "lora have no effect"),
        ([GAE, "stages.1.critic={backbone: polcy}"], "stages[1].critic.backbone", "own, policy"),
        ([GAE, "stages.1.critic={clip: 0}"], "stages[1].critic.clip", "more than 0"),
        ([GAE, "stages.1.critic={value_coef: 1}"], "stages[1].critic.value_coef", "path, lora"),
        ([GAE, "stages.1.critic={tau: 0.1}"], "stages[1].critic.tau", "path, lora"),
        (["stages.1.critic={kind: archer}"], "stages[1].critic", "use archer"),
        (["stages.1.advantage={kind: progress}", "stages.1.critic={kind: contributions}"], "stages[1].critic",
         "use progress with contributions: critic"),
        ([GAE, "stages.1.critic={kind: archer}"], "stages[1].critic.kind", "values"),
        ([ARCHER, "stages.1.critic={}"], "stages[1].critic.kind", "archer"),
        ([ARCHER, "stages.1.critic={kind: archr}"], "stages[1].critic.kind", "values, archer"),
        ([ARCHER, "stages.1.critic={kind: archer, clip: 1}"], "stages[1].critic.clip", "gamma, tau"),
        ([ARCHER, "stages.1.critic={kind: archer, tau: 0}"], "stages[1].critic.tau", "more than 0"),
        ([ARCHER, "stages.1.critic={kind: archer, warmup_steps: 3}"], "stages[1].critic.warmup_steps", "less than"),
        ([ARCHER, "stages.1.critic={kind: archer, path: ./nowhere}"], "stages[1].critic.path", "config.json"),
        ([ARCHER, "stages.1.critic={kind: archer, backbone: policy, gradient: backbone}"],
         "stages[1].critic", "backbone: own"),
        (["stages.1.advantage={kind: progress}", "stages.1.critic={kind: contributions, warmup_steps: 1}"],
         "stages[1].critic", "use progress"),
        ([PROGRESS, "stages.1.critic={}"], "stages[1].critic.kind", "contributions"),
        ([PROGRESS, "stages.1.critic={kind: contributions, warmup_steps: 0}"], "stages[1].critic", "raise them"),
        ([PROGRESS, "stages.1.critic={kind: contributions, bootstrap: false}"], "stages[1].critic.bootstrap", "frozen"),
        ([SWEET, "stages.1.critic={}"], "stages[1].critic.kind", "sweet"),
        ([SWEET, "stages.1.critic={kind: sweet, warmup_steps: 1}", "stages.1.group_size=1"], "stages[1].group_size",
         "at least 2"),
        ([SWEET, "stages.1.critic={kind: sweet, privileged_text: Think.}"], "stages[1].critic",
         "leave it empty to give the critic no privileged text"),
        ([SWEET, "stages.1.critic={kind: sweet, head_lr: 1}"], "stages[1].critic.head_lr", "privileged_text, over"),
        ([SWEET, "stages.1.critic={kind: sweet, warmup_steps: 1, path: ./nowhere}"], "stages[1].critic.path",
         "config.json"),
        ([ARCHER, "stages.1.critic={kind: archer, capacity: 1}"], "stages[1].critic.capacity", "group_size = "),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(echo: Path, overrides: list[str], where: str, expected: str) -> None:
    with pytest.raises(RecipeError) as error:
        load(echo, overrides)
    assert error.value.where == where, str(error.value)
    assert expected in error.value.expected, str(error.value)


def test_a_bound_that_nothing_can_reach_is_doubted(echo: Path) -> None:
    def said(critic: str, *more: str) -> list[str]:
        one = ["stages.1.epochs=1", "stages.1.minibatches=1"]
        recipe = load(echo, [GAE, *one, f"stages.1.critic={critic}", *more])
        return [text for text in cautions(recipe) if "critic.clip" in text]

    assert said("{clip: 0.2}") and not said("{clip: 0.2}", "stages.1.epochs=2")
    assert not said("{}") and not said("{clip: null}") and not said("{clip: 0.2, backbone: policy}")


def test_a_critic_beside_deepspeed_is_whole_in_each_process(echo: Path) -> None:
    def loaded(zero: int, critic: str, advantage: str = GAE) -> object:
        stage = [advantage, f"stages.1.critic={critic}", f"stages.1.trainer={{kind: deepspeed, zero_stage: {zero}}}"]
        return load(echo, [*stage, "stages.0.trainer={kind: deepspeed}"])

    assert loaded(3, "{}") and loaded(3, "{lora: {rank: 2}}") and loaded(2, "{backbone: policy}")
    for zero, critic, says in (
        (1, "{backbone: policy, gradient: backbone}", "the trainer has a copy of"),
        (3, "{backbone: policy}", "sharded weights"),
    ):
        with pytest.raises(RecipeError, match=says) as error:
            loaded(zero, critic)
        assert error.value.where == "stages[1].critic.backbone" and "own" in error.value.expected
    with pytest.raises(RecipeError) as error:
        loaded(1, "{kind: archer}", ARCHER)
    assert error.value.where == "stages[1].critic.kind" and error.value.expected == "values"


def test_roles_are_not_chosen_beside_a_critic(echo: Path) -> None:
    with pytest.raises(RecipeError) as error:
        load(echo, [GAE, "stages.1.critic={}", "stages.1.train_roles=[plan]"])
    assert error.value.where == "stages[1].train_roles" and "'plan'" in error.value.got
    assert load(echo, ["stages.1.train_roles=[plan]"]).stages[1].train_roles == ("plan",)


_ZERO = "advantage: {kind: gae}, trainer: {kind: deepspeed}"


@pytest.mark.parametrize(
    ("stage", "got"),
    [
        ("{kind: preference}", "preference in stages[0]"),
        ("{kind: reward_model}", "reward_model in stages[0]"),
        (f"{{kind: policy_gradient, critic: {{}}, {_ZERO}}}", "stages[0].critic, whose transformer is trained"),
    ],
)
def test_float16_is_refused_where_the_loss_is_not_scaled(echo: Path, stage: str, got: str) -> None:
    policy = "policy={kind: pretrained, path: a/b, dtype: %s}"
    load(echo, [policy % "bfloat16", f"stages=[{stage}]"])
    with pytest.raises(RecipeError) as error:
        load(echo, [policy % "float16", f"stages=[{stage}]"])
    assert error.value.where == "policy.dtype" and error.value.got == f"float16, with {got}"


@pytest.mark.parametrize("critic", ["{backbone: policy}", "{gradient: head}"])
def test_a_value_head_in_float32_takes_a_transformer_in_float16(echo: Path, critic: str) -> None:
    stage = f"{{kind: policy_gradient, critic: {critic}, {_ZERO}}}"
    load(echo, ["policy={kind: pretrained, path: a/b, dtype: float16}", f"stages=[{stage}]"])
