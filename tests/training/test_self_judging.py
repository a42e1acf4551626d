"""A judge that is the policy of some steps ago: who judges when, what an audit finds, and a run that goes on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rewards.judges.judge import Grade
from rewards.models.local_model import LocalChat, hold, load_chat, release
from rlhf.errors import RecipeError, TrainingError
from rlhf.evaluation.statistics import success_estimate
from rlhf.recipe import load as load_recipe
from rlhf.recipe.checks import cautions
from rlhf.recipe.compatibility import check_processes
from rlhf.rollout.scoring import WeightedReward
from rlhf.training.contrib.judge_refresh import Audited, JudgeRefreshHook, learnt, model_of
from rlhf.training.contrib.judge_refresh_settings import JudgeRefresh, doubled
from rlhf.training.policy.model import Lora
from tests import test_resume as resume
from tests.training import runs, tiny, words

# --- the audit -------------------------------------------------------------------------------------------------------


def test_a_tie_is_half_right_as_worked_by_hand() -> None:
    # Right, a tie and wrong: (1 + ½ + 0) / 3 = ½, as three of six.
    assert doubled([1.0, 0.5, 0.0]) == [True, True, True, False, False, False]
    found = success_estimate(doubled([1.0, 0.5, 0.0]), [0, 0, 1, 1, 2, 2])
    assert found.value == 0.5 and found.low < 0.2 and found.high > 0.8


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=6, max_size=60))
def test_counting_each_pair_twice_makes_nothing_surer(preferred: list[float]) -> None:
    twice = success_estimate(doubled(preferred), [i // 2 for i in range(2 * len(preferred))])
    once = success_estimate([x == 1 for x in preferred], list(range(len(preferred))))
    assert twice.value == pytest.approx(once.value)
    assert twice.high - twice.low >= once.high - once.low - 1e-9


def test_what_is_audited_is_shown_as_it_was() -> None:
    pair = Audited("t", ("Say red.", [("red", "Right.")]), ("Say red.", [("blue", "Wrong."), ("red", "")]))
    right, wrong = pair.trajectories
    assert (right.opening, [t.action.text for t in right.turns]) == ("Say red.", ["red"])
    assert [(t.action.text, t.reply) for t in wrong.turns] == [("blue", "Wrong."), ("red", "")]
    assert not right.solved and not wrong.solved  # how it came out is for the judge to find


# --- who judges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["full", "lora"])
def test_a_judge_is_the_policy_as_it_was(lora: Lora | None) -> None:
    policy = tiny.policy(lora=lora)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.requires_grad:
                p.add_(0.1)
        then, before = learnt(policy), policy.model(input_ids=ids).logits
        for p in policy.model.parameters():
            if p.requires_grad:
                p.add_(0.1)
        now = policy.model(input_ids=ids).logits
        judge = model_of(policy, then)
        assert torch.allclose(judge(input_ids=ids).logits, before, atol=1e-4)
        assert not torch.allclose(now, before, atol=1e-2)
        assert torch.equal(policy.model(input_ids=ids).logits, now)  # the policy is as it was
    assert not any(p.requires_grad for p in judge.parameters())
    assert {name for name, p in policy.model.named_parameters() if p.requires_grad} == set(then)


def test_a_model_in_memory_is_asked_by_a_name(tmp_path: Path) -> None:
    policy = tiny.policy()
    message = [{"role": "user", "content": "alpha"}]
    policy.save(tmp_path)
    hold("./one", model_of(policy, learnt(policy)), policy.tokenizer)
    expected, found = (LocalChat(path).first_token(message) for path in (str(tmp_path), "./one"))
    assert [t for t, _ in found] == [t for t, _ in expected]
    assert [x for _, x in found] == pytest.approx([x for _, x in expected], abs=1e-5)
    release("./one")
    with pytest.raises(OSError):
        load_chat("./one")


# --- whole runs ------------------------------------------------------------------------------------------------------

#: A judge that gives what the model finds likeliest of its first tokens, and a truth; both differ between attempts.
OWN = """
from pydantic.dataclasses import dataclass

from rewards.judges.asking import AsksModel, asked, record_of
from rlhf.data import Verdict
from rlhf.settings import STRICT


def odd(task, trajectory):
    return float(sum(map(ord, "".join(turn.action.text for turn in trajectory.turns))) % 2)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Likes(AsksModel):
    async def __call__(self, task, trajectory):
        question = asked([("Attempt", record_of(task, trajectory, 200))], "Well?")
        [listed] = await self.all_of([lambda asker: asker.first_token(question)])
        return Verdict(listed[0][1])
"""
RENEWAL: dict[str, Any] = {"every": 2, "truth": "truth", "tasks": 4, "group_size": 3, "min_accuracy": 0.0}
STAGE = resume.POLICY_GRADIENT | {"judge_refresh": RENEWAL}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a policy."""
    folder = tmp_path_factory.mktemp("start")
    done = runs.run(runs.write(folder, [resume.SUPERVISED], evaluation={"n_tasks": 2}), folder / "run")
    return str(runs.newest(done.folder) / "policy")


def recipe(folder: Path, start: str, stages: list[dict[str, Any]], **rewards: Any) -> Path:
    policy = {"kind": "pretrained", "path": start}
    rewards = {
        "own": {"kind": "./own.py:Likes", "path": start},
        "truth": {"kind": "./own.py:odd", "weight": 0},
    } | rewards
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own.py").write_text(OWN)
    return runs.write(
        folder, stages, policy=policy, rewards=rewards, evaluation={"n_tasks": 2, "validation_n_tasks": 2}
    )


def test_a_stopped_run_equals_one_that_was_not(start: str, tmp_path: Path) -> None:
    path = recipe(tmp_path, start, [STAGE, STAGE | {"steps": 1, "judge_refresh": None}])
    calls: list[int] = []
    with words.on_every_step(path, lambda: calls.append(1)):
        whole = runs.run(path, tmp_path / "whole")
    draw = random.Random(0)
    at = [draw.randrange(1, len(calls) // 3) for _ in range(5)]
    assert resume.run_with_interruptions(path, tmp_path / "stopped", at) >= 3
    resume.assert_equal(tmp_path / "stopped", tmp_path / "whole")
    # Audited: the first judge, after 2 steps the policy of step 0, after 4 that of step 2.
    assert runs.curve(whole.folder, "judge_refresh/n_refreshes") == [0.0, 1.0, 2.0]
    assert runs.curve(whole.folder, "judge_refresh/age") == [0.0, 2.0, 2.0]
    assert [line["step"] for line in runs.log(whole.folder) if "judge_refresh/age" in line] == [0, 2, 4]
    names = ("checkpoints/0-policy_gradient-000002/policy", "judges/0-policy_gradient")
    files = [(whole.folder / name / "model.safetensors") for name in names]
    left = (tmp_path / "stopped" / names[1] / "model.safetensors").read_bytes()
    assert files[1].read_bytes() == left
    judge, then = (LocalChat(str(file.parent)).first_token([{"role": "user", "content": "x"}]) for file in files[::-1])
    assert files[0].is_file() is False or judge == then  # the policy of step 2, where its checkpoint still stands


def test_a_policy_that_judges_badly_does_not_become_the_judge(start: str, tmp_path: Path) -> None:
    grade = {"kind": "grade", "path": start, "scale": "yes_no", "unreadable": "wrong", "max_tokens": 4}
    stage = STAGE | {"judge_refresh": RENEWAL | {"min_accuracy": 0.6, "reward": "graded"}}
    done = runs.run(recipe(tmp_path, start, [stage], graded=grade), tmp_path / "run")
    # It says nothing that can be read: every verdict is 0, all pairs are ties, and ½ is less than .6.
    assert runs.curve(done.folder, "judge_refresh/audit_accuracy") == [0.5, 0.5]
    assert runs.curve(done.folder, "judge_refresh/tie_share") == [1.0, 1.0]
    assert runs.curve(done.folder, "judge_refresh/n_refreshes") == [0.0, 0.0]
    assert runs.curve(done.folder, "judge_refresh/audit_failed") == [0.0, 1.0]
    assert "does not become the judge of graded" in done.said
    assert "Judge that was refreshed" in (done.folder / "report.html").read_text()
    assert not (done.folder / "judges").exists()


def test_an_audit_needs_a_right_and_a_wrong_attempt_at_a_task(start: str, tmp_path: Path) -> None:
    stage = STAGE | {"judge_refresh": RENEWAL | {"success_threshold": 9.0}}
    with pytest.raises(TrainingError, match="cannot be audited") as caught:
        runs.run(recipe(tmp_path, start, [stage]), tmp_path / "run")
    assert "judge_refresh.success_threshold" in caught.value.hint


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"reward": "onw"}, ["judge_refresh.reward", "did you mean 'own'?"]),
        ({"reward": "truth"}, ["judge_refresh.reward", "judge with a path"]),
        ({"truth": "own"}, ["judge_refresh.truth"]),
        ({"truth": "truht"}, ["judge_refresh.truth", "did you mean 'truth'?"]),
        ({"split": "valid"}, ["judge_refresh.split", "dev"]),
        ({"min_accuracy": 60}, ["judge_refresh.min_accuracy"]),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(start: str, tmp_path: Path, settings: Any, says: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe(tmp_path, start, [STAGE | {"judge_refresh": RENEWAL | settings}]))
    assert all(text in str(caught.value) for text in says), caught.value


def test_a_judge_on_a_server_is_not_renewed_and_one_process_is_enough(start: str, tmp_path: Path) -> None:
    far = {"kind": "grade", "url": "http://127.0.0.1:1", "model": "m"}
    with pytest.raises(RecipeError, match="judge with a path"):
        load_recipe(recipe(tmp_path, start, [STAGE | {"judge_refresh": {"reward": "far"}}], far=far))
    found = load_recipe(recipe(tmp_path, start, [STAGE | {"judge_refresh": {"every": 9}}]))
    with pytest.raises(RecipeError, match="in one process"):
        check_processes(found, 2)
    assert any("judge_refresh.every is 9" in text for text in cautions(found))


def test_its_state_goes_on_and_keeps_its_judge(tmp_path: Path) -> None:
    policy = tiny.policy()
    reward = Grade(path=str(tmp_path))
    settings = JudgeRefresh(every=2)
    one, other = (JudgeRefreshHook.of(settings, {"r": WeightedReward("r", 1.0, reward)}, policy) for _ in range(2))
    assert one is not None and other is not None and one.live is reward and one.is_due
    one.audit = [Audited("t", ("a", (("b", "c"),)), ("d", ()))]
    one.n_audits, one.is_due = 1, False
    one._decide(True, 2)
    one.learn(3)
    assert not one.is_due and one.n_renewals == 1 and (one.judge_step, one.next_step) == (0, 2)
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.audit == one.audit and other.judge is not None and other.live.path.endswith("of step 0")
    assert all(torch.equal(other.judge[name], p) for name, p in learnt(policy).items())
    for keeper in (one, other):
        keeper.learn(4)
        assert keeper.is_due
        keeper._decide(False, 4)
        keeper.is_due = False
        keeper.learn(6)
        assert keeper.is_over and not keeper.is_due and keeper.judge_step == 0
        keeper.close()
