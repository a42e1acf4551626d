"""Token by token: pieces of text, colours by advantage, and text that stays text."""

from __future__ import annotations

import random
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Trajectory, Turn
from rlhf.evaluation.store import TrajectoryRecord, TrajectoryWriter
from rlhf.evaluation.transcript import choose, load_tokenizer, pieces, transcript
from tests.evaluation.synthetic import make_group, make_tokenizer, make_trajectory

TOKENIZER = make_tokenizer()


def record_of(*generations: Generation, advantages: tuple[tuple[float, ...], ...] | None = None) -> TrajectoryRecord:
    turns = tuple(Turn(Action("a", (g,)), "reply") for g in generations)
    return TrajectoryRecord(0, "s", "train", "t", Trajectory("t", 0, "o", turns, Outcome.FAILED), None, advantages)


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text).ids)


@given(st.text(alphabet=st.characters(max_codepoint=127), max_size=40))
def test_pieces_together_are_the_text(text: str) -> None:
    assert "".join(pieces(TOKENIZER, ids(text))) == text


def test_a_token_that_ends_inside_a_character_shows_its_name() -> None:
    shown = pieces(TOKENIZER, ids("a🙂b"))
    assert (shown[0], shown[-2:]) == ("a", ["🙂", "b"])
    assert len(shown) == 6 and all(shown)  # the emoji is four bytes, a token each


def test_without_a_tokenizer_ids_are_shown() -> None:
    assert pieces(None, [5, 7]) == ["[5]", "[7]"]
    assert "[5] [7]" in transcript(record_of(Generation(Prompt((5, 7)), (1,), (-1.0,), Finish.STOP, 0)), None, 1.0)
    assert pieces(TOKENIZER, [10_000_000]) == ["[10000000]"]


def test_only_sampled_tokens_are_coloured_by_sign_and_size() -> None:
    first = Generation(
        Prompt(ids("<|user|>look<|assistant|>")), ids("go east"), (-0.5,) * len(ids("go east")), Finish.STOP, 1
    )
    n = len(first.token_ids)
    html = transcript(record_of(first, advantages=((2.0,) + (-1.0,) * (n - 2) + (0.0,),)), TOKENIZER, 2.0)
    tokens = re.findall(r'<span class="t( up| down)?"(?: style="--a:([\d.]+)")? title="([^"]*)">', html)
    assert [sign for sign, _, _ in tokens] == [" up", *[" down"] * (n - 2), ""]
    # the largest advantage gets full colour, half of it 0.12 + 0.88/2
    assert [a for _, a, _ in tokens] == ["1.00", *["0.56"] * (n - 2), ""]
    assert "log-prob -0.500 (p 0.607), advantage 2" in tokens[0][2]
    assert '<span class="obs" title="3 tokens the model read">&lt;|user|&gt;look&lt;|assistant|&gt;</span>' in html


def test_a_rewritten_prompt_is_shown_whole_and_said_to_be_one() -> None:
    first = Generation(Prompt(ids("one")), ids("two"), (-1.0,) * len(ids("two")), Finish.STOP, 0)
    grown = Generation(Prompt((*first.full_ids, *ids("three"))), (1,), (-1.0,), Finish.STOP, 0)
    rewritten = Generation(Prompt(ids("four")), (1,), (-1.0,), Finish.LENGTH, 0)
    html = transcript(record_of(first, grown, rewritten), TOKENIZER, 1.0)
    assert html.count("context rewritten") == 1
    assert ">three<" in html and "onetwothree" not in html
    assert html.count(">cut<") == 1  # and a generation that ran into its limit is marked


def test_text_of_models_and_environments_stays_text() -> None:
    evil = '</span><script>alert("x")</script><img src=x onerror=alert(1)>\x1b[31m'
    sampled = ids(evil)
    generation = Generation(Prompt(ids(evil)), sampled, (-1.0,) * len(sampled), Finish.STOP, 0)
    turn = Turn(Action(evil, (generation,), error=evil), evil, valid=False)
    t = Trajectory(evil, 0, evil, (turn, Turn(Action(evil), evil)), Outcome.ENV_ERROR, detail=evil)
    html = transcript(TrajectoryRecord(0, "s", "train", evil, t), TOKENIZER, 0.0)
    assert "<script" not in html and "<img" not in html and "\x1b" not in html
    assert "␛[31m" in html
    assert set(re.findall(r"<(\w+)", html)) <= {"div", "span", "b", "output", "details", "summary"}


def test_the_newest_tokenizer_is_taken(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "checkpoints" / "9").mkdir(parents=True)
    (tmp_path / "tokenizer.json").write_text("damaged")
    assert load_tokenizer(tmp_path) is None
    make_tokenizer().save(str(tmp_path / "checkpoints" / "9" / "tokenizer.json"))
    found = load_tokenizer(tmp_path)
    assert found is not None and found.decode(list(ids("take coin"))) == "take coin"


def test_six_trajectories_tell_the_story(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path)
    assert choose(tmp_path) == []
    rng = random.Random(0)
    for step, skill in ((1, 0.3), (2, 0.4), (9, 0.5)):
        pairs = [make_group(TOKENIZER, rng, f"t{step}-{i}", 4, skill, step) for i in range(6)]
        writer.write_groups("train", step, "train", [g for g, _ in pairs], [c for _, c in pairs])
    for name, step, skill in (("before", 0, 0.2), ("after", 9, 0.9)):
        groups = [make_group(TOKENIZER, rng, f"test{i}", 1, skill, step)[0] for i in range(5)]
        writer.write_groups(name, step, "eval", groups)
    picked = choose(tmp_path)
    assert [caption for caption, _ in picked] == [
        "Training, step 1: not solved",
        "Training, step 1: solved",
        "Training, step 9: not solved",
        "Training, step 9: solved",
        "Evaluation, before: not solved",
        "Evaluation, after: solved",
    ]
    assert all(r.trajectory.solved is caption.endswith(": solved") for caption, r in picked)
    assert all(any(a for row in r.advantages or () for a in row) for _, r in picked[:4])


def test_a_trajectory_of_no_turns_can_be_shown() -> None:
    t = make_trajectory(TOKENIZER, random.Random(0), "t", 0, 0.5, 0)
    empty = Trajectory("t", 0, t.opening, (), Outcome.TIMEOUT, "took too long")
    assert "took too long" in transcript(TrajectoryRecord(0, "s", "train", "t", empty), TOKENIZER, 1.0)
