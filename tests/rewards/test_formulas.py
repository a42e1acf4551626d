"""Rewards of trajectories, by the numbers of their papers worked by hand."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rewards.answers.exact import ExactMatch
from rewards.answers.qa import QuestionAnswer
from rewards.answers.tags import Format, FormatOutcome, well_formed
from rewards.check import check_reward
from rewards.combinators.of_part import OfPart
from rewards.contrib.budgeted import Budgeted, worth
from rewards.contrib.fluency import LanguageConsistency, Repetition, in_script, repeated
from rewards.contrib.improvement import Improvement
from rewards.contrib.interleaved import IntermediateAnswers
from rewards.contrib.interleaved import worth as worth_on_the_way
from rewards.contrib.key_steps import KeySteps, StepReference
from rewards.contrib.page_action import PageAction
from rewards.contrib.search import Called, CostAware, SearchEfficiency, ToolUse, n_calls, thrift
from rewards.shaping.length import Budget, Concise, concise, length
from rewards.verified import Verified
from rlhf.data import Action, Outcome, Trajectory, Turn
from rlhf.errors import RecipeError, RewardError
from rlhf.recipe import load
from tests.rewards.played import played, task

ANSWER = "<think>I know</think><answer>Paris</answer>"
SEARCH = ("<think>hm</think><search>capital</search>", "<information>It is Paris.</information>")
PARIS = task("Paris")
#: What may follow what in an answer that thinks, searches and reads before it answers, as in Search-R1.
SEARCH_R1: dict[str, tuple[str, ...]] = {
    "": ("think",),
    "think": ("search", "answer"),
    "search": ("information",),
    "information": ("think", "search", "answer"),
    "answer": (),
}


@pytest.mark.parametrize(
    "part",
    [
        *(
            Format(),
            FormatOutcome(),
            SearchEfficiency(),
            Called(),
            ToolUse(),
            CostAware(),
            Concise(),
            Budget(limit=9),
            PageAction(),
        ),
        *(Repetition(n=2), LanguageConsistency(), LanguageConsistency(script="japanese", penalty=True)),
    ],
    ids=lambda part: type(part).__name__,
)
def test_each_keeps_the_contract(part):
    pytest.importorskip("rouge_score")
    report = check_reward(part)
    assert report.ok, str(report)


# --- length -----------------------------------------------------------------------------------------------------------


def test_correct_attempts_earn_more_the_shorter_they_are():
    # μ 200, s √(20000/3) = 81.649658: σ(∓1.224745) = .227097 and .772903; 1 − .1 · that
    assert concise([True] * 3, [100, 200, 300], 0.1) == pytest.approx([0.9772897, 0.95, 0.9227103])
    assert concise([True], [7], 0.1) == [0.95]  # σ(0) = .5
    assert concise([True, False], [7, 1], 0.1) == [0.95, 0.0]  # μ and s are of correct ones
    assert concise([False, False], [7, 1], 0.1) == [0.0, 0.0]
    assert concise([True] * 2, [1, 10**6], 0.4) == pytest.approx(  # s = |length − μ|: σ(∓1)
        [1 - 0.4 / (1 + math.e), 1 - 0.4 / (1 + 1 / math.e)]
    )


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 10**9)), max_size=8), st.floats(0, 0.999))
def test_any_correct_attempt_beats_every_wrong_one(rows, alpha):
    values = concise([ok for ok, _ in rows], [n for _, n in rows], alpha)
    for (ok, _), value in zip(rows, values, strict=True):
        assert (1 - alpha <= value <= 1) if ok else value == 0


def test_concise_asks_a_reward_or_a_verifier_what_is_correct():
    group = [played("Paris", n_tokens=[n], attempt=i) for i, n in enumerate((100, 200, 300))]
    group.append(played("London", n_tokens=[50], attempt=3))
    found = asyncio.run(Concise(correct=ExactMatch()).over_group(PARIS, group))
    assert [v.value for v in found] == pytest.approx([0.9772897, 0.95, 0.9227103, 0])

    def says_paris(answer: str, reference: str) -> float:
        return float(answer == reference)

    again = asyncio.run(Concise(correct=says_paris).over_group(PARIS, group))
    assert again == found
    own = group[0].turns[0]
    theirs = tuple(replace(g, opponent="an opponent") for g in own.generations)
    long = replace(group[0], turns=(own, replace(own, action=replace(own.action, generations=theirs))))
    assert length(long, "tokens") == 100 and length(long, "turns") == 1 and long.n_tokens == 200
    by_turns = Concise(unit="turns", alpha=0.4)
    group = [played(*"ab", outcome=Outcome.SOLVED), played(*"abcd", outcome=Outcome.SOLVED)]
    # 2 and 4 turns: μ 3, s 1, σ(−1) = .268941
    assert asyncio.run(by_turns.over_group(PARIS, group))[0].value == pytest.approx(1 - 0.4 * 0.2689414)


@pytest.mark.parametrize(("used", "value"), [(0, 0), (100, 0), (150, -0.5), (200, -1), (900, -1)])
def test_a_budget_costs_what_exceeds_it(used, value):
    assert Budget(limit=100)(PARIS, played("a", "b", n_tokens=[used, 0])).value == value
    assert Budget(limit=2, unit="turns")(PARIS, played("a", "b", "c")).value == -0.5


# --- form -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (ANSWER, ""),
        ("\n".join([*SEARCH, ANSWER]), ""),
        ("".join([*SEARCH, "<answer>Paris</answer>"]), ""),  # reading may lead straight to the answer
        ("<think>a < b</think>\n<answer><b>Paris</b></answer>", ""),  # other tags are text
        ("", "no tags"),
        ("Paris", "no tags"),
        ("<answer>Paris</answer>", "<answer> begins the text"),
        ("<think>x</think>", "ends after <think>, not <answer>"),
        ("<think>x", "<think> is never closed"),
        ("<think>x<answer>Paris</answer></think>", "<answer> within <think>"),
        ("<think>x</answer>", "</answer> closes <think>"),
        ("</think><answer>Paris</answer>", "</think> closes nothing"),
        ("<think>x</think><search>q</search>" + ANSWER, "<think> follows <search>"),  # nothing was found yet
        (ANSWER + ANSWER, "<think> follows <answer>"),
        ("Well, " + ANSWER, "text before <think>, outside of all tags"),
        (ANSWER + " Done.", "text after the last tag"),
    ],
)
def test_the_order_of_tags_is_a_state_machine(text, wrong):
    assert well_formed(text, SEARCH_R1, "answer") == wrong
    assert Format(transitions=SEARCH_R1, inline_replies=True)(task(), played(text)).value == (not wrong)


def test_a_reply_that_the_agent_makes_up_breaks_the_form():
    made_up = "<search>q</search><information>Paris</information><answer>Paris</answer>"
    assert "<information> is for the environment to write" in Format()(task(), played(made_up)).why
    assert FormatOutcome()(task("Paris"), played(made_up)).value == 0.8
    assert SearchEfficiency()(task("Paris"), played(made_up)).value == -1


def test_text_between_tags_may_be_allowed_and_replies_left_out():
    assert well_formed("Well, " + ANSWER + " Done.", SEARCH_R1, "answer", strict=False) == ""
    both = played(SEARCH, ANSWER)
    assert Format()(task(), both).value == Format(transitions=SEARCH_R1)(task(), both).value == 1
    assert Format(replies=False)(task(), both).value == 0  # then <think> follows <search>
    assert Format()(task(), played((ANSWER, "You are done."))).value == 1  # the last reply is nobody's answer
    with pytest.raises(ValidationError, match=r"does not define what may follow answer"):
        Format(transitions={"": ("think",), "think": ("answer",)})


@given(st.text(alphabet="<>/thinkanswer \n", max_size=80))
def test_the_machine_reads_anything(text):
    assert isinstance(well_formed(text, SEARCH_R1, "answer"), str)
    assert well_formed(f"<think>{text.replace('<', '')}</think><answer></answer>", SEARCH_R1, "answer") == ""


@pytest.mark.parametrize(
    ("text", "value"),
    # right and well-formed; right; well-formed; an answer; nothing: 1, 1 − .2, .2, .1, 0
    [
        (ANSWER, 1.0),
        ("<answer>Paris</answer>", 0.8),
        (ANSWER.replace("Paris", "Rome"), 0.2),
        ("<answer>Rome</answer>", 0.1),
        ("Paris", 0.0),
        ("", 0.0),
    ],
)
def test_outcomes_are_softened_by_form(text, value):
    assert FormatOutcome(form=Format(transitions=SEARCH_R1))(PARIS, played(text)).value == pytest.approx(value)


def test_a_form_for_each_way_of_thinking():
    # TimeHC-RL: intuition answers at once, deliberation thinks first; each is asked of its own part of a mixture.
    quick = OfPart(part="quick", reward=Format(transitions={"": ("answer",), "answer": ()}))
    careful = OfPart(part="careful", reward=Format(transitions={"": ("think",), "think": ("answer",), "answer": ()}))

    def worth(part, said):
        posed = replace(PARIS, info={"part": part})
        return sum(asyncio.run(one(posed, played(said))).value for one in (quick, careful))

    at_once = "<answer>Paris</answer>"
    assert [worth("quick", said) for said in (at_once, ANSWER)] == [1, 0]
    assert [worth("careful", said) for said in (at_once, ANSWER)] == [0, 1]
    assert worth("another", ANSWER) == 0


def test_what_was_retrieved_counts_where_the_answer_is_wrong():
    shown = played(SEARCH, "<think>no</think><answer>Rome</answer>")
    assert FormatOutcome(retrieval=0.1)(PARIS, shown).value == pytest.approx(0.3)  # .2 + .1
    assert FormatOutcome(retrieval=0.1)(task("Oslo"), shown).value == pytest.approx(0.2)
    assert FormatOutcome(retrieval=0.1)(task('["Oslo", "Paris"]'), shown).value == pytest.approx(0.3)
    assert FormatOutcome(retrieval=0.1)(task("par"), shown).value == pytest.approx(0.2)  # no word of the reply
    last = replace(shown.turns[-1], reply="Wrong, it was Paris.")
    told = replace(shown, turns=(replace(shown.turns[0], reply="Nothing."), last))
    assert FormatOutcome(retrieval=0.1)(PARIS, told).value == pytest.approx(0.2)  # told after the answer
    with pytest.raises(RewardError, match="no reference"):
        FormatOutcome()(task(), shown)


# --- searches, tools, costs -------------------------------------------------------------------------------------------


def test_knowing_beats_searching_and_searching_beats_guessing():
    def value(n, answer="Paris"):
        return SearchEfficiency()(PARIS, played(*[SEARCH] * n, ANSWER.replace("Paris", answer))).value

    assert [value(n) for n in range(5)] == pytest.approx([1.6, 1.4, 1.2, 1.0, 1.0])
    assert (value(0, "Rome"), value(2, "Rome")) == (0.0, 0.05)
    assert SearchEfficiency()(PARIS, played("Paris")).value == -1


def test_only_searches_that_were_carried_out_count():
    assert n_calls(played(SEARCH, SEARCH, ANSWER), "search") == 2  # the same query twice counts twice
    assert n_calls(played("<search>never closed"), "search") == 0
    made = [
        "<answer>Paris</answer><search>y</search>",
        "<answer>Paris <search></search></answer>",
        '{"name": "answer", "arguments": {"value": "<search></search>"}}',
        '<answer>{"name": "search", "arguments": {"query": "x"}}</answer>',
    ]
    assert [n_calls(played(one), "search") for one in made] == [0, 0, 0, 0]
    assert n_calls(played("<think>so</think>\n<search>a</search><search>b</search>"), "search") == 1  # as one is made
    done = [
        "search: who wrote <i>Emma</i>",
        "search[<b>x</b>]",
        "<Search>x</Search>",
        "<plan>x</plan><search>x</search>",
        '<search>find {"name": "x"}</search>',
        '{"name": "search", "arguments": {"query": "x"}}',
    ]
    assert [n_calls(played(one), "search") for one in done] == [1] * 6


def test_both_stages_of_r1_searcher():
    recipe = load("search_qa/search_qa-two_stages-qwen3")
    attempts = (
        played(SEARCH, "<think>so</think><answer>the city Paris</answer>"),  # searched, in form, F1 2/3
        played(ANSWER),  # in form, right
        played(SEARCH, "Paris"),  # searched, right, out of form
        played("Rome"),
    )
    of = {"searched": Called(), "form": Format(), "answer": Verified(QuestionAnswer(metric="f1"))}

    def worth(stage, attempt):
        return sum(weight * of[name](PARIS, attempt).value for name, weight in stage.rewards.items())

    first, second = recipe.stages
    assert [worth(first, attempt) for attempt in attempts] == [1.0, 0.5, 0.5, 0.0]
    # F1, less 2 where the form is broken, plus the 2 that all have
    assert [worth(second, attempt) - 2 for attempt in attempts] == pytest.approx([2 / 3, 1, 1 - 2, 0 - 2])
    assert Called(min_calls=2)(PARIS, attempts[0]).value == 0 and Called(tool="python")(PARIS, attempts[0]).value == 0


def test_tools_earn_a_bonus_together():
    part = ToolUse(tools=("search", "python"))
    assert [part.value(0.7, used) for used in (True, False)] == pytest.approx([0.8, 0.7])
    assert part.value(0.0, True) == 0
    run, found = ("python(1)", "1"), ("<think>hm</think><search>q</search>", "x")
    # "the city Paris" has 2 words after its article, 1 in common with 1: F1 2/3
    end = ANSWER.replace("Paris", "the city Paris")
    assert part(PARIS, played(found, run, end)).value == pytest.approx(2 / 3 + 0.1)
    assert part(PARIS, played(found, end)).value == pytest.approx(2 / 3)
    assert part(PARIS, played("Paris")).value == -1


def test_costs_are_weighed_between_two_bounds():
    low, high = 11, 29
    assert thrift(400, low, high) == pytest.approx(0.5)  # 1 − (20 − 11)/18
    assert (thrift(0, low, high), thrift(10**6, low, high), thrift(7, 5, 5)) == (1, 0, 0.5)
    part = CostAware(cost_weight=0.6, min_sqrt_cost=low, max_sqrt_cost=high)
    assert part.value(0.8, 400) == pytest.approx(0.62)  # .8 · .4 + .6 · .5
    assert part.value(0.0, 0) == 0  # cheap and wrong is wrong
    told = played((SEARCH[0], SEARCH[1] + "cost=150"), (SEARCH[0], SEARCH[1] + "Cost: 250.0"), ANSWER)
    assert part.spent(told) == 400
    assert CostAware(cost_weight=0.6, min_sqrt_cost=low, max_sqrt_cost=high, form=Format(strict=False))(
        PARIS, told
    ).value == pytest.approx(0.7)
    with pytest.raises(ValidationError, match="a group around the number"):
        CostAware(cost=r"\d+")


# --- actions ----------------------------------------------------------------------------------------------------------


def test_part_marks_for_an_action():
    pytest.importorskip("rouge_score")
    click = {"type": "click", "name": "red shoes size nine"}

    def value(said, wanted=click, **settings):
        reference = task(json.dumps(wanted))
        return PageAction(**settings)(reference, played(said if isinstance(said, str) else json.dumps(said))).value

    half = {"type": "click", "name": "red shoes of leather"}  # 2 of 4 words on either side: R .5
    assert value(half) == pytest.approx(501.0)  # .5 + .3 + .2 + 1000 · .5
    assert value(half, min_score=0.75) == pytest.approx(1.0)  # R counts as 0
    assert value(click, difficulty=1) == pytest.approx(2.0)
    assert value({"type": "terminate"}) == 0.5  # JSON, of another type
    assert value({"type": "terminate"}, wanted={"type": "terminate"}) == pytest.approx(1.1)  # .5 + .3 + .3
    typed = {"type": "type_and_submit", "name": "search", "text": "red shoes size nine"}
    assert value(typed, wanted=typed, difficulty=1) == pytest.approx(2.1)  # .8 + .1 + .1 + .1 · 1 + 1
    assert value({**typed, "text": "red shoes of leather"}, wanted=typed) == pytest.approx(501.1)
    assert value("click the shoes") == 0 and value("[1]") == 0
    parted = replace(task(json.dumps(click)), info={"structured": True})  # a mapping as verl's `ground_truth`
    assert PageAction()(parted, played(json.dumps(half))).value == pytest.approx(501.0)


# --- how it is said ---------------------------------------------------------------------------------------------------


def test_repetition_by_hand():
    assert repeated("a b a b a b", 2) == pytest.approx(0.6)  # ab ba ab ba ab: 2 of 5 are new
    assert repeated("a", 2) == 0 and repeated("", 1) == 0
    assert Repetition(n=2, penalty=0.5)(task(), played("a b a", "b a b")).value == pytest.approx(-0.3)
    assert Repetition()(task(), played("word " * 1000)).value == pytest.approx(-1, abs=0.002)  # 1 of 981 is new


def test_thoughts_are_looked_at_with_the_action():
    turns = (Turn(Action("yes", reply_text="<think>да да да да да</think>yes"), ""), Turn(Action("no"), ""))
    thought = Trajectory("t", 0, "", turns, Outcome.FAILED)
    # "<think>да да да да да</think>yes no" has 5 runs of 2 words: the middle ones are the same.
    assert Repetition(n=2)(task(), thought).value == pytest.approx(-1 / 5)
    assert LanguageConsistency()(task(), thought).value == pytest.approx(15 / 25)  # think, think, yes, no


def test_letters_tell_the_language():
    assert in_script("Да, yes", "cyrillic") == pytest.approx(0.4)
    assert in_script("学校へ行く", "japanese") == 1 and in_script("学校へ行く", "han") == pytest.approx(0.6)
    assert in_script("42!", "greek") == 1  # no letters, nothing wrong
    assert LanguageConsistency(min_share=0.8)(task(), played("abcd я")).value == 1  # 4 of 5
    assert LanguageConsistency(penalty=True)(task(), played("abcd я")).value == pytest.approx(-0.2)


def test_what_another_try_is_worth() -> None:
    # Tries worth 0, 1, 1 and then 0 again: the second mends it, the fourth spoils it.
    outcomes = [Outcome.FAILED, Outcome.SOLVED, Outcome.SOLVED, Outcome.FAILED]
    chain = [
        replace(played("x", outcome=outcome, attempt=i), parent=i - 1 if i else None)
        for i, outcome in enumerate(outcomes)
    ]
    found = asyncio.run(Improvement(alpha=2.0).over_group(PARIS, chain))
    assert [v.value for v in found] == [0.0, 2.0, 0.0, -2.0]
    [alone] = asyncio.run(Improvement().over_group(PARIS, chain[1:2]))  # its parent failed by a part
    assert alone.value == 0.0


def test_key_steps_of_r1_vl() -> None:
    given = replace(PARIS, info={"key_steps": ["the area", ["half", "1/2"], "base", "height"]})
    said = played("First The  area; it is 1/2 of all. The baseline helps.")
    share = KeySteps()(given, said).value
    assert share == 0.5
    assert (
        1 + 0.1 * share + Format(transitions={"": ("answer",), "answer": ()})(PARIS, played("<answer>x</answer>")).value
        == 2.05
    )
    with pytest.raises(RewardError, match="the task has no expected steps"):
        KeySteps()(PARIS, said)


def test_steps_of_r1_router() -> None:
    reward = StepReference()
    assert reward.value(0.8, True) == pytest.approx(0.9) and reward.value(0.8, False) == pytest.approx(0.4)
    steps = [{"call": "text", "query": "red ball"}, {"call": "table", "query": "its price"}]
    given = replace(PARIS, info={"columns": {"steps": steps}})
    verdict = reward(given, played("text[Red  ball]", "image[its price]", "answer[3]"))
    assert verdict.per_turn == pytest.approx((0.5, 0.25, 0.0)) and verdict.value == pytest.approx(0.75)


def test_right_answers_by_their_budget() -> None:
    # f(n) = 4 cos(π n / 8192): f(1024) = 3.695518, f(2048) = 2.828427.
    assert [worth(n, 1024, 4096) for n in (1024, 512, 2048, 4097)] == pytest.approx(
        [3.695518, 3.695518, 2.578427, 0.0], abs=1e-6
    )
    reward = Budgeted(budgets=(1, 2048))
    tries = [played("x", n_tokens=[1024], outcome=Outcome.SOLVED, attempt=i) for i in (0, 1, 3)]
    values = [asyncio.run(reward(PARIS, t)).value for t in (*tries, played("x", n_tokens=[9]))]
    assert values == pytest.approx([3.695518 - 1023 / 4096, 2.828427, 2.828427, 0.0], abs=1e-6)


def test_other_budgets_than_attempts_are_told_are_refused(tmp_path: Path) -> None:
    from tests import recipe_parts

    rollout = ["stages.1.rollout={kind: budgets, budgets: [8, 16]}", "stages.1.group_size=4"]
    path = recipe_parts.write(tmp_path)
    with pytest.raises(RecipeError, match="not those of the reward"):
        load(path, ["rewards={right: {kind: budgeted, budgets: [16, 8]}}", *rollout])
    load(path, ["rewards={right: {kind: budgeted, budgets: [8, 16]}}", *rollout])


# --- answers on the way -----------------------------------------------------------------------------------------------


def test_answers_on_the_way_to_a_right_one():
    right = [True, False, True]
    found = [worth_on_the_way(right, scheme) for scheme in ("all", "partial", "discounted")]
    assert found == pytest.approx([0, 2 / 3, 8 / 11]) and worth_on_the_way([True] * 3, "all") == 1
    hops = replace(task("Rome"), info={"steps": ["Italy", "a boot", "Rome is old"]})
    block = "<think>t</think><answer>{}</answer>".format
    said = "".join(map(block, ["Italy", "a shoe", "rome is old", "Rome"]))
    reward = IntermediateAnswers()
    assert reward(hops, played(said)).value == pytest.approx(8 / 11)
    assert reward(hops, played(said.replace("<answer>Rome", "<answer>Paris"))).value == 0  # the last one is wrong
    assert reward(hops, played(said + "so")).value == 0  # and here the form is
    # Missing answers are wrong, and what is said beyond those that there are counts for nothing.
    assert reward(hops, played(block("Italy") + block("Rome"))).value == pytest.approx(6 / 11)
    more = "".join(map(block, ["Italy", "a boot", "Rome is old", "more", "Rome"]))
    assert reward(hops, played(more)).value == 1 and reward(hops, played(block("Rome"))).value == 0
    with pytest.raises(RewardError, match="the task has no expected steps"):
        reward(task("Rome"), played(said))
