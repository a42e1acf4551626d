"""KTO: replies that are good or bad each, by TRL's trainer with our rows, against our own loss."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.build.pair_data import check_sources
from rlhf.errors import MissingPackageError, RecipeError
from rlhf.recipe import load
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.stages import pair_files
from rlhf.training.stages.pairs import Side
from rlhf.training.stages.preference import Preference
from rlhf.training.stages.preference_training import rated_rows
from rlhf.training.stages.rated import Rated, mismatched, of_pairs, shuffled
from rlhf.training.stages.trl_trainers import load_trl, train_kto
from tests.training import runs, tiny, words
from tests.training.test_attempts import START

try:
    load_trl()
except MissingPackageError:
    pytest.skip("needs the extra trl", allow_module_level=True)

from tests.training.test_preference import logps, made

STAGE: dict[str, Any] = {
    "kind": "preference", "loss": "kto", "epochs": 6, "batch_size": 16, "beta": 0.3,
    "optimizer": {"lr": 5.0e-3, "schedule": "linear"},
}  # fmt: skip


def reply(prompt: tuple[int, ...], said: tuple[int, ...], is_good: bool = True) -> Rated:
    return Rated(str(prompt), Side(prompt + said, (False,) * len(prompt) + (True,) * len(said)), is_good)


def test_replies_after_other_prompts_are_those_of_the_neighbours_in_one_pass() -> None:
    rated = [reply((1,), (11, 12)), reply((2, 2), (22,)), reply((3,), (33,)), reply((4,), (44,)), reply((5,), (55,))]
    found = [side.token_ids for side in mismatched(rated, 3, 9)]
    assert found == [(1, 33), (2, 2, 11, 12), (3, 22), (4, 55), (5, 44)]
    assert mismatched(rated, 3, 9)[1].mask == (False, False, True, True)
    # The context has room for one token beside the second prompt.
    assert mismatched(rated, 3, 3)[1].token_ids == (2, 2, 11)
    # Both sides of a pair are replies to one prompt: the reply is another prompt's, of another pass if need be.
    both = [reply((1,), (11,)), reply((1,), (12,)), reply((2,), (21,)), reply((2,), (22,))]
    assert [side.token_ids for side in mismatched(both, 4, 9)] == [(1, 22), (1, 22), (2, 12), (2, 12)]
    assert [side.token_ids[0:2] for side in mismatched(both, 2, 9)] == [(1, 22), (1, 22), (2, 12), (2, 12)]
    assert [side.token_ids for side in mismatched(both[:2], 2, 9)] == [(1, 12), (1, 11)]  # there is no other
    assert len(shuffled(rated, 4, "a")) == 4 and len(shuffled(rated, 5, "a")) == 5  # nobody is compared with itself


def test_the_reply_left_out_of_a_last_pass_is_of_the_label_with_more() -> None:
    rated = [reply((i,), (10 + i,), is_good=i == 0) for i in range(9)]
    for seed in map(str, range(12)):
        found = shuffled(rated, 8, seed)
        assert len(found) == 8 and any(one.is_good for one in found)
        assert [one for one in found if one in shuffled(rated, 9, seed)] == found
    assert len(shuffled(rated[:8], 8, "0")) == 8


def test_both_sides_of_pairs_are_replies_once() -> None:
    pairs = made(tiny.policy())
    rated = of_pairs([*pairs, pairs[0]])
    assert len(rated) == len({(r.side, r.is_good) for r in rated}) and {r.is_good for r in rated} == {True, False}


@pytest.mark.parametrize("at_once", [64, 3])
def test_an_update_by_trl_is_the_gradient_of_our_loss(at_once: int) -> None:
    policy = tiny.policy()
    stage = Preference(
        optimizer=AdamW(lr=1e-3, max_grad_norm=None), batch_size={64: 64, 3: 12}[at_once],
        pairs_per_microbatch=at_once, loss="kto", beta=0.2, desirable_weight=1.5,
    )  # fmt: skip
    rated = of_pairs(made(policy))[:11]
    rows = rated_rows(policy, stage, rated)
    for i, row in enumerate(rows):  # a reference that is another model
        row["ref_logps"] += 0.3 * i - 1
        row["ref_KL_logps"] -= 0.2 * i
    own = logps(policy, [r.side for r in rated])
    ratios = own - torch.tensor([row["ref_logps"] for row in rows])
    others = mismatched(rated, at_once, policy.max_context)
    drifted = logps(policy, others) - torch.tensor([row["ref_KL_logps"] for row in rows])
    is_good = torch.tensor([r.is_good for r in rated])
    passes = [slice(i, i + at_once) for i in range(0, len(rated), at_once)]
    drifts = [drifted[some].mean().clamp(min=0) for some in passes]
    assert max(drifts) > 0
    losses = []  # λ (1 − σ(β (r − z))) of good ones, 1 − σ(β (z − r)) of bad ones
    for some, drift in zip(passes, drifts, strict=True):
        ahead = 0.2 * (ratios[some] - drift.detach())
        losses.append(torch.where(is_good[some], 1.5 * torch.sigmoid(-ahead), torch.sigmoid(ahead)))
    expected = torch.cat(losses).mean()
    expected.backward()
    norm = float(tiny.gradient(policy.model).norm())
    policy.model.zero_grad(set_to_none=True)
    seen: list[Any] = []
    train_kto(policy.model, policy.tokenizer, rows, stage, lambda n, logs: seen.append(logs), seed=0)
    assert len(seen) == 1
    assert seen[0]["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert seen[0]["logps/chosen"] == pytest.approx(float(own[is_good].mean()), rel=1e-5)
    assert seen[0]["logps/rejected"] == pytest.approx(float(own[~is_good].mean()), rel=1e-5)
    margin = float(0.2 * (ratios[is_good].mean() - ratios[~is_good].mean()))
    assert seen[0]["rewards/margins"] == pytest.approx(margin, abs=1e-4)
    assert seen[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)


def rated_lines(n: int) -> list[dict[str, Any]]:
    rng, lines = random.Random(0), []
    for i in range(n):
        right, wrong = rng.sample(words.WORDS, 2)
        lines.append({"prompt": f"Say {right}.", "completion": (right, wrong)[i % 2], "label": i % 2 == 0})
    return lines


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rated.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rated_replies_of_a_file_are_learnt(tmp_path: Path) -> None:
    stages = [START, STAGE | {"pairs": {"file": write(tmp_path, rated_lines(96))}}]
    done = runs.run(runs.write(tmp_path, stages), tmp_path / "run")
    assert done.result["success_after"] > done.result["success_before"] + 0.2, done.result
    assert (
        runs.curve(done.folder, "preference/n_desirable")
        == runs.curve(done.folder, "preference/n_undesirable")
        == [48.0]
    )
    assert len(runs.curve(done.folder, "preference/kl")) == 6 * 6
    assert len((done.folder / "pairs" / "1-preference.jsonl").read_text().splitlines()) == 96


def test_replies_are_read_from_tables_messages_and_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion,label\nSay red.,red,true\nSay red.,blue,False\n")
    asked, said = {"role": "user", "content": "Say red."}, {"role": "assistant", "content": "red"}
    rows = [
        {"prompt": [asked], "completion": [said], "label": True},
        {"prompt": "Say red.", "chosen": "red", "rejected": "blue"},
    ]
    for path, expected in (
        (tmp_path / "a.csv", [("red", True), ("blue", False)]),
        (Path(write(tmp_path, rows)), [("red", True), ("red", True), ("blue", False)]),
    ):
        found = pair_files.read_rated(path, "x")
        assert [(r.text, r.label) for r in found] == expected
        assert {r.prompt[0].content for r in found} == {"Say red."}


@pytest.mark.parametrize(
    ("rows", "changes", "says"),
    [
        ([{"prompt": "a", "completion": "b", "label": "good"}], {}, "line 1"),
        ([{"prompt": "a", "completion": "b", "lable": True}], {}, "did you mean 'label'"),
        ([{"prompt": "a", "completion": "b"}], {}, "'label' is missing"),
        ([{"prompt": "a", "completion": "b", "label": True}] * 2, {}, "all replies of this file are good"),
        ([{"prompt": "a", "completion": "b", "label": True}], {"loss": "dpo"}, "line 1"),
        ([], {"sft_coef": 0.1}, "sft_coef"),
        ([], {"loss": "dpo", "desirable_weight": 2.0}, "desirable_weight"),
        ([], {"pairs_per_microbatch": 1, "batch_size": 1}, "no other prompts"),
    ],
)
def test_what_cannot_be_learnt_is_refused_before_anything_loads(
    rows: list[dict[str, Any]], changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    stages = [STAGE | {"pairs": {"file": write(tmp_path, rows)}} | changes]
    with pytest.raises(RecipeError) as refused:
        check_sources(load(runs.write(tmp_path, stages)))
    assert says in str(refused.value), refused.value
