"""Agreement of a reward with labels of people: figures worked by hand, and `rlhf check reward --on` a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.data import Message, Role
from rlhf.evaluation.contrib import agreement
from rlhf.rollout.renderer import Renderer
from rlhf.training.reward_model_training import save, scoring_model
from tests.commands import run
from tests.rewards.test_judge import fair
from tests.test_endpoint import completion, served
from tests.training import tiny

TARGETS = '''
def length(task, trajectory):
    """Longer is better; what the user asked is never read."""
    return float(len(trajectory.turns[-1].action.text))


def constant(task, trajectory):
    return 0.0


def fails(task, trajectory):
    if trajectory.opening == "b":
        raise ValueError("no idea")
    return 1.0
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TARGETS)
    return tmp_path


def write(rows: list[dict[str, Any]], name: str = "labels.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def checked(target: str, on: str, exit_code: int = 0) -> tuple[dict[str, str], dict[str, Any]]:
    """Details of the report by what they are about, and all that was printed."""
    result = run("check", "reward", target, "--on", on, "--json")
    assert result.exit_code == exit_code, result.output
    printed = json.loads(result.stdout.splitlines()[-1])
    [report] = printed["reports"]
    return {one["promise"].removeprefix("labels: "): one["detail"] for one in report["findings"]}, printed


# --- figures ---------------------------------------------------------------------------------------------------------


def test_accuracy_and_kappa_as_worked_by_hand() -> None:
    labels, values = [1.0] * 5 + [0.0] * 5, [1.0, 0.9, 0.5, 1.0, 0.4, 0.6, 0.0, 0.1, 0.0, 0.0]
    found = agreement.accuracy(values, labels, range(10))
    assert found.value == pytest.approx(0.8) and 0 < found.low < 0.8 < found.high < 1
    kappa = agreement.kappa(found, values, labels)
    assert kappa is not None and kappa.value == pytest.approx(0.6)
    assert (kappa.low, kappa.high) == (pytest.approx(2 * found.low - 1), pytest.approx(2 * found.high - 1))
    assert agreement.kappa(agreement.accuracy([1.0], [1.0], "a"), [1.0], [1.0]) is None
    # replies to one prompt are one piece of evidence where they agree
    alike = agreement.accuracy([1.0] * 8 + [0.0] * 8, [1.0] * 16, [i // 4 for i in range(16)])
    apart = agreement.accuracy([1.0] * 8 + [0.0] * 8, [1.0] * 16, range(16))
    assert alike.high - alike.low > apart.high - apart.low


def test_order_compares_within_groups_alone_and_ties_count_half() -> None:
    # of group 0 the pairs (1, 0) right, (1, 0) a tie; of group 1 one wrong; what has equal labels is no pair
    values, labels, groups = [3.0, 1.0, 3.0, 1.0, 2.0], [1.0, 0.0, 0.0, 5.0, 4.0], [0, 0, 0, 1, 1]
    found, n_ties = agreement.order(values, labels, groups, groups)
    assert (found.value, found.n, n_ties) == (pytest.approx(0.5), 3, 1)
    assert agreement.order([1.0, 2.0], [1.0, 0.0], [0, 1], [0, 1])[0].n == 0


def test_correlation_has_a_width_even_where_all_agree() -> None:
    found = agreement.correlation([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0], range(5))
    assert found is not None and found.value == pytest.approx(1) and found.low < 0.7 and found.high >= found.value
    many = agreement.correlation([float(i) for i in range(99)], [float(i % 50) for i in range(99)], range(99))
    assert many is not None and -1 < many.low < many.value < many.high < 1 and many.high - many.low < 0.5
    few = agreement.correlation([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0], [0, 0, 1, 1])
    assert few is not None and (few.low, few.high) == (-1, 1)
    assert agreement.correlation([1.0, 1.0], [0.0, 1.0], [0, 1]) is None


# --- labelled replies ------------------------------------------------------------------------------------------------


def test_a_verifier_beside_labels(folder: Path) -> None:
    said = [("7", True), ("7", True), ("8", False), ("8", True), ("6", False), ("7", False)]
    rows = [
        {"prompt": f"{i} + {7 - i}?", "completion": text, "label": label, "reference": "7", "who": "me"}
        for i, (text, label) in enumerate(said)
    ]
    found, printed = checked("numeric", write(rows))
    assert found["accuracy"].startswith("66.7% (95% interval ") and "of 6 rows" in found["accuracy"]
    assert found["Cohen's kappa"].startswith("0.333 (")
    assert found["confusion"].splitlines() == [
        "labelled right: 2 taken for right, 1 for wrong",
        "labelled wrong: 1 taken for right, 2 for wrong",
    ]
    assert "chance would agree as well" in found["agreement"]
    assert [(one["line"], one["value"], one["outcome"]) for one in printed["attempts"]] == [
        (4, 0.0, "labelled 1"),
        (6, 1.0, "labelled 0"),
    ]
    shown = run("check", "reward", "numeric", "--on", "labels.jsonl").stdout
    assert "read first, what the labels contradict most:" in shown and "labels.jsonl, line 4: '3 + 4?'" in shown


def test_a_table_and_points_on_a_scale(folder: Path) -> None:
    rows = [(f"q{i}", "x" * i, 6 - i if i == 3 else i) for i in range(1, 9)]
    Path("points.csv").write_text("prompt,completion,label\n" + "".join(f"{p},{c},{x}\n" for p, c, x in rows))
    found, printed = checked("./mine.py:length", "points.csv")
    assert found["rank correlation"].startswith("1.000 (95% interval 0.")
    assert "accuracy" not in found and "agreement" not in found and not printed["attempts"]
    Path("points.csv").write_text("prompt,completion,label\n" + "".join(f"q{i},{'x' * i},{-i}\n" for i in range(9)))
    found, printed = checked("./mine.py:length", "points.csv")
    assert found["rank correlation"].startswith("-1.000") and "other way round" in found["agreement"]
    assert {one["line"] for one in printed["attempts"][:2]} == {2, 10}, "the ends of the scale lie farthest apart"


def test_replies_that_fail_are_listed_first(folder: Path) -> None:
    rows = [{"prompt": p, "completion": "yes", "label": 1} for p in "abca"]
    found, printed = checked("./mine.py:fails", write(rows), exit_code=2)
    assert found["call: judges every reply"].startswith("1 failed") and "no idea" in found["call: judges every reply"]
    assert found["accuracy"].endswith("of 3 rows; threshold 0.5") and "undefined" in found["Cohen's kappa"]
    assert found["agreement"] == "all labels are the same: label good replies and bad ones"
    assert [(one["line"], one["value"]) for one in printed["attempts"]] == [(2, None)]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "completion": "b", "label": "good"}, "label is no number"),
        ({"prompt": "a", "completion": "b", "label": "nan"}, "label is no number"),
        ({"prompt": "a", "completion": "b"}, "the field 'label' is missing"),
        ({"prompt": "a", "chosen": "b"}, "the field 'rejected' is missing"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
    ],
)
def test_rows_that_cannot_be_used_are_named(folder: Path, row: dict[str, Any], says: str) -> None:
    result = run("check", "reward", "numeric", "--on", write([row]))
    assert result.exit_code == 2 and says in result.stderr and "labels.jsonl, line 1" in result.stderr, result.output


# --- pairs, judges and reward models ---------------------------------------------------------------------------------


def pairs_of(n: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Number {i}?", "chosen": f"{i + 2}", "rejected": f"{i + 1}"} for i in range(n)]


def test_a_judge_compares_pairs_in_both_orders(folder: Path) -> None:
    rows = [*pairs_of(15), {"prompt": "Number?", "chosen": "1", "rejected": "5"}]
    with served(fair) as (url, asked):
        found, printed = checked(f"{{kind: judge, url: '{url}', model: m}}", write(rows))
    assert found["pairwise accuracy"].startswith("93.8% (95% interval ")
    assert len(asked) == 32 and "agreement" not in found
    [worst] = printed["attempts"]
    assert worst["line"] == 16 and worst["value"] == -1 and worst["action"] == "'1' is chosen over '5'"


def test_a_judge_that_takes_the_first_agrees_no_more_than_chance(folder: Path) -> None:
    def first(body: dict[str, Any], _: int) -> Any:
        mark = body["messages"][0]["content"].split("END ")[1].split()[0].rstrip(".,:;")
        return completion(f"VERDICT {mark}: A")

    with served(first) as (url, _):
        found, _ = checked(f"{{kind: judge, url: '{url}', model: m}}", write(pairs_of(8)))
    assert "8 ties counted half" in found["pairwise accuracy"]
    assert "all replies are worth the same" in found["agreement"]


def test_a_reward_that_likes_the_first_place_gains_nothing_by_it(folder: Path) -> None:
    Path("mine.py").write_text(
        "class First:\n    def over_group(self, task, trajectories):\n"
        "        return [float(i == 0) for i in range(len(trajectories))]\n"
    )
    found, _ = checked("./mine.py:First", write(pairs_of(10)))
    assert found["pairwise accuracy"].startswith("50.0%")


def test_a_reward_model_reads_the_tokens_of_its_own_tokenizer(folder: Path) -> None:
    policy = tiny.policy()
    torch.manual_seed(0)
    model = scoring_model(policy)
    save(folder / "scores", model, policy.tokenizer)
    renderer, scores = Renderer(policy.tokenizer), {}
    for text in ("omega", "gamma waits"):
        ids = [*renderer.prompt([Message(Role.USER, "alpha beta")]).token_ids, *renderer.encode_reply(text)]
        scores[text] = model.eval()(input_ids=torch.tensor([ids])).logits.item()
    rows = [{"prompt": "alpha beta", "completion": text, "label": -score} for text, score in scores.items()]
    found, printed = checked("{kind: reward_model, path: scores}", write(rows))
    assert found["pairwise accuracy"].startswith("0.0%")
    values = {one["action"]: one["value"] for one in printed["attempts"]}
    assert values == {text: pytest.approx(score, abs=1e-4) for text, score in scores.items()}
    gone = run("check", "reward", "{kind: reward_model, path: ./gone}", "--on", "labels.jsonl")
    assert gone.exit_code == 2 and "the reward model cannot be loaded" in gone.stderr, gone.output
