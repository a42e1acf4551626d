"""A graph of facts: what an observation tells, what is out of date, what is found around a thing, and what is kept."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.base import History
from agents.chat import ChatAgent
from agents.check import check_agent
from agents.memory.base import DemonstrationInputs
from agents.memory.window import Window
from agents.stores.contrib.facts import Fact, Pattern, applied, around, fact, nearest_episodes
from agents.stores.contrib.graph import FACTS, REFUSED, Graph, _World
from agents.stores.copies import content_hash
from agents.stores.faults import StoreFull, StoreLocked
from agents.stores.kind import ENTRIES, RECALLED, PerTurnRetrieval, StoreKind, asks_policy
from agents.stores.remembering import Bound, Remembering
from agents.stores.store import Store
from rlhf.data import Outcome, Score, ScoredGroup, Task, Trajectory, Turn
from tests.agents.spoken import Speaks

IN, EXIT = r"(?P<subject>\w+) is (?P<relation>in|on) the (?P<object>\w+)", r"(?P<subject>\w+) (?P<relation>leads to) (?P<object>\w+)"  # fmt: skip # noqa: E501
RULES = Pattern(patterns=(IN, EXIT), exclusive=("in", "on"))
KEY, BOX, HALL = Fact("key", "in", "box"), Fact("box", "in", "hall"), Fact("hall", "leads to", "attic")


def play(graph: Graph, store: Store | None, texts: list[str], policy: Any = None, task: str = "t") -> list[Turn]:
    """An episode that observes `texts`, whatever is done."""
    agent = Remembering(inner=ChatAgent(system="", memory=Window(turns=1)), store=graph)
    turns: list[Turn] = []
    policy = policy or Speaks(["go"] * len(texts))
    for i in range(len(texts)):
        history = History(Task(task), texts[0], tuple(turns))
        action = asyncio.run(agent.act_with(store, history, policy))
        turns.append(Turn(action, texts[i + 1] if i + 1 < len(texts) else "The end."))
    return turns


def group(task: str, opening: str, *attempts: list[Turn], solved: bool = False) -> ScoredGroup:
    outcome = Outcome.SOLVED if solved else Outcome.FAILED
    made = tuple(Trajectory(task, i, opening, tuple(turns), outcome) for i, turns in enumerate(attempts))
    return ScoredGroup(task, made, tuple(Score({}, (0.0,) * len(t.turns), 0.0) for t in made))


def learn(graph: Graph, store: Store, task: str, texts: list[str]) -> dict[str, float]:
    with store.transaction():
        return dict(graph.learn(store, [group(task, texts[0], play(graph, store, texts, task=task))], "train"))


def known(store: Store) -> set[str]:
    return {e.text for e in store.entries("fact")}


# --- the graph itself ------------------------------------------------------------------------------------------------


def test_rules_read_facts_in_the_order_in_which_they_are_told() -> None:
    text = "A hall leads to Attic. The KEY is in the box; the lamp is on the table."
    assert list(RULES(text)) == [("hall", "leads to", "Attic"), ("KEY", "in", "box"), ("lamp", "on", "table")]
    # In and on exclude each other; that a hall leads somewhere says nothing of where else it leads.
    assert RULES.replaces(("key", "on", "table"), ("key", "in", "box"))
    assert not RULES.replaces(("key", "on", "table"), ("lamp", "in", "box"))
    assert not RULES.replaces(("hall", "leads to", "cellar"), ("hall", "leads to", "attic"))


@pytest.mark.parametrize(
    ("patterns", "says"),
    [(("(?P<subject>a",), "no regular expression"), (("a",), "no group subject"), ((), "at least 1")],
)
def test_what_is_no_pattern_of_a_fact_is_refused(patterns: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Pattern(patterns=patterns)


@pytest.mark.parametrize("parts", [None, "abc", ["a", "b"], ["a", "", "c"], ["a", 1, "c"], ["a", "b", "c" * 61], ["\ud800", "b", "c"]])  # fmt: skip # noqa: E501
def test_what_is_no_fact_is_none(parts: object) -> None:
    assert fact(parts) is None


def test_a_fact_is_in_lower_case_without_commas() -> None:
    assert fact([" The  Key,", "IN", "Box"]) == Fact("the key", "in", "box")


def test_facts_around_what_was_found_are_taken_to_a_depth_and_a_width() -> None:
    facts = [KEY, BOX, HALL, Fact("attic", "has", "ghost"), Fact("sea", "is", "blue")]
    assert around(facts, "where is the key", k=1, depth=0, width=9) == [KEY]
    assert around(facts, "where is the key", k=1, depth=1, width=9) == [KEY, BOX]
    assert around(facts, "where is the key", k=1, depth=2, width=9) == [KEY, BOX, HALL]
    assert around(facts, "where is the key", k=1, depth=9, width=9) == facts[:4]
    # Of three others at the box the newest two.
    more = [KEY, *(Fact("box", "is", name) for name in ("old", "red", "new"))]
    assert around(more, "key", k=1, depth=1, width=2) == [KEY, more[3], more[2]]
    assert around([], "key", k=1, depth=1, width=1) == [] == around(facts, "nothing known", k=3, depth=2, width=2)


def test_the_episode_with_most_of_what_was_found_comes_first_by_worked_numbers() -> None:
    # n / N log N: 2/2 ln 2 = .693; 2/4 ln 4 = .693, of equal ones the later; 1/1 ln 1 = 0; 0 of what was found: never.
    others = [Fact("a", "b", str(i)) for i in range(2)]
    told = {1: [KEY, BOX], 2: [KEY, BOX, *others], 3: [KEY], 4: others}
    assert nearest_episodes(told, [KEY, BOX], 9) == [2, 1, 3]
    # 3/4 ln 4 = 1.04
    assert nearest_episodes(told | {5: [KEY, BOX, HALL, others[0]]}, [KEY, BOX, HALL], 1) == [5]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12))
def test_what_is_told_holds_and_what_is_out_of_date_does_not(told: list[tuple[int, int]]) -> None:
    facts: list[Fact] = []
    world = _World()
    for new, old in told:
        facts = applied(facts, [Fact(str(new), "is", "x")], [Fact(str(old), "is", "x")])
        world.observe("", [Fact(str(new), "is", "x")], [Fact(str(old), "is", "x")])
        assert list(world.facts) == facts, "in place it is the same"
        assert facts[-1] == Fact(str(new), "is", "x") and len(set(facts)) == len(facts)
        assert old == new or Fact(str(old), "is", "x") not in facts


# --- in an episode ---------------------------------------------------------------------------------------------------


def test_what_was_seen_and_forgotten_is_shown_where_it_is_of_use_and_an_outdated_fact_never() -> None:
    texts = ["The key is in the box.", "You wait.", "The key is on the table.", "Hm.", "A table with what on it?"]
    policy = Speaks(["go"] * 5)
    turns = play(Graph(extractor=RULES, n_observations=0), None, texts, policy)
    assert [t.action.notes[RECALLED] for t in turns] == ["", "", "", "", "Known:\n- key, on, table"]
    assert policy.asked[-1] == ("", "Known:\n- key, on, table\nA table with what on it?")
    assert json.loads(turns[2].action.notes[FACTS]) == {"new": [["key", "on", "table"]], "old": [["key", "in", "box"]]}
    seen = play(Graph(extractor=RULES), None, texts)[-1].action.notes[RECALLED]
    assert seen.splitlines()[2:] == ["Seen before:", "- The key is on the table."]


def test_what_an_observation_says_itself_is_not_shown_again() -> None:
    turns = play(Graph(extractor=RULES, n_observations=0), None, ["Box is in the hall.", "Key is in the box."])
    assert turns[1].action.notes[RECALLED] == "Known:\n- box, in, hall"


def test_a_memory_that_keeps_all_shows_each_observation_with_what_stood_before_it_then() -> None:
    agent = Remembering(inner=ChatAgent(system=""), store=Graph(extractor=RULES, n_observations=0))
    policy, turns = Speaks(["a", "b", "c"]), ()
    texts = ["Box is in the hall.", "Key is in the box.", "The key is on the floor."]
    for i in range(3):
        action = asyncio.run(agent.act(History(Task("t"), texts[0], turns), policy))
        turns = (*turns, Turn(action, texts[i + 1] if i < 2 else ""))
    prompts = [[m.content for m in messages] for _, messages in policy.shown]
    assert prompts[1] == ["Box is in the hall.", "a", "Known:\n- box, in, hall\nKey is in the box."]
    assert prompts[2][:3] == prompts[1], "later prompts extend earlier ones"
    again = Speaks(["c"])
    asyncio.run(agent.act(History(Task("t"), texts[0], turns[:2]), again))
    assert [m.content for m in again.shown[0][1]] == prompts[2], "an episode is what its turns are"


def test_the_text_keeps_within_its_tokens() -> None:
    texts = [" ".join(f"k{i} is in the box." for i in range(30)), "What is in the box?"]
    for most in (1, 3, 9, 40):
        shown = play(Graph(extractor=RULES, k=30, max_new=30, max_tokens=most), None, texts)[1].action.notes[RECALLED]
        assert len(shown.split()) <= most
        assert bool(shown) == (most >= 5)  # "Known:", and "- k1, in, box"


def test_the_policy_says_what_is_new_and_what_is_out_of_date() -> None:
    says = [{"facts": [["key", "in", "box"]]}, {"facts": [["key", "on", "table"]], "outdated": [1]}, {}]
    policy = Speaks(["go"] * 3, memory=map(json.dumps, says))
    turns = play(Graph(ask="?"), None, ["A key in a box.", "The key is on a table.", "Where is the key?"], policy)
    asked = [text for role, text in policy.asked if role == "memory"]
    assert asked[1] == "Known:\n1: key, in, box\nObservation: The key is on a table.\n?"
    assert asked[2] == "Known:\n1: key, on, table\nObservation: Where is the key?\n?"
    assert turns[2].action.notes[RECALLED].splitlines()[:2] == ["Known:", "- key, on, table"]
    assert [g.role for g in turns[0].generations] == ["memory", ""]


@pytest.mark.parametrize(
    ("said", "n"),
    [
        ("no JSON", 1),
        ("", 1),
        ("[1]", 1),
        ('{"facts": ', 1),
        ("{}", 0),
        ('{"facts": 3, "outdated": "1"}', 0),
        ('{"facts": [["a", "b"], 3, ["a", "b", "c"]], "outdated": [7, 0, true, "1"]}', 6),
        ('{"facts": [["\\ud800", "x", "y"]]}', 1),
        ('{"outdated": [' + "9" * 400 + "]}", 1),
        ("[" * 5000, 1),
    ],
)
def test_a_reply_that_says_no_facts_is_left_as_a_note_and_the_episode_goes_on(store: Store, said: str, n: int) -> None:
    graph = Graph()
    turns = play(graph, store, ["A key in a box.", "Go on."], Speaks(["go", "go"], memory=[said, "{}"]))
    assert turns[0].action.text == "go" and turns[0].action.notes.get(REFUSED, "0") == str(n)
    with store.transaction():
        assert graph.learn(store, [group("t", "A key in a box.", turns)], "train")["store/n_refused"] == n
    assert known(store) <= {"a, b, c"}


def test_an_error_of_the_agent_is_no_observation() -> None:
    agent, graph = ChatAgent(system="", format="tagged"), Graph(extractor=RULES)
    remembering = Remembering(inner=agent, store=graph)
    first = asyncio.run(remembering.act(History(Task("t"), "Hello."), Speaks([""])))
    assert first.error
    turns = (Turn(first, f"{first.error} The key is in the box.", valid=False),)
    second = asyncio.run(remembering.act(History(Task("t"), "Hello.", turns), Speaks(["<action>go</action>"])))
    assert FACTS not in second.notes


# --- from one episode to the next ------------------------------------------------------------------------------------


def test_another_task_is_shown_what_this_one_left_and_this_one_is_not(store: Store) -> None:
    graph = Graph(extractor=RULES)
    figures = learn(graph, store, "a", ["The key is in the box.", "The box is in the hall."])
    assert figures["store/n_facts"] == 2 and figures["store/n_entries"] == 4 and figures["store/n_replaced"] == 0
    assert {(link.source, link.target, link.relation) for link in store.links()} == {(3, 1, "tells"), (4, 2, "tells")}
    before = content_hash(store)
    [turn] = play(graph, store, ["Where is the key?"], task="b")
    shown = "Known:\n- key, in, box\n- box, in, hall\nSeen before:\n- The box is in the hall."
    assert turn.action.notes[RECALLED] == shown and turn.action.notes[ENTRIES] == "1 2 4"
    assert play(graph, store, ["Where is the key?"], task="a")[0].action.notes[RECALLED] == ""
    assert (
        play(replace(graph, include_same_task=True), store, ["Where is the key?"], task="a")[0].action.notes[ENTRIES]
        == "1 2 4"
    )
    assert content_hash(store) == before, "an episode only reads"


def test_newer_facts_replace_older_ones_in_the_store(store: Store) -> None:
    graph = Graph(extractor=RULES)
    learn(graph, store, "a", ["The key is in the box.", "The box is in the hall."])
    figures = learn(graph, store, "b", ["The key is on the table."])
    assert known(store) == {"key, on, table", "box, in, hall"} and figures["store/n_replaced"] == 1
    # A task's newer attempt stands for it: what its older one told, and no other task, goes.
    learn(graph, store, "c", ["The box is in the hall."])
    figures = learn(graph, store, "a", ["The lamp is on the bed."])
    assert known(store) == {"key, on, table", "box, in, hall", "lamp, on, bed"} and figures["store/n_replaced"] == 0


def test_one_attempt_of_each_task_is_kept_a_solution_where_there_is_one(store: Store) -> None:
    graph = Graph(extractor=RULES)
    short, long = (play(graph, store, ["Hello."] + [f"k{n} is in the box."] * n + ["Ah."], task="a") for n in (1, 3))
    both = group("a", "Hello.", long, short)
    won = ScoredGroup("a", tuple(replace(t, outcome=Outcome.SOLVED) for t in both.trajectories), both.scores)
    with store.transaction():
        graph.learn(store, [won], "train")
    assert known(store) == {"k1, in, box"}


def test_of_too_many_facts_and_observations_the_oldest_go(store: Store) -> None:
    graph = Graph(extractor=RULES, max_facts=3, max_observations=2)
    for i in range(5):
        learn(graph, store, f"t{i}", [f"k{i} is in the box."])
    assert known(store) == {f"k{i}, in, box" for i in (2, 3, 4)} and len(store.entries("observation")) == 2
    play(graph, store, ["What is in the box?"], task="z")  # an observation whose facts are gone is no trouble


def test_a_task_that_judges_leaves_nothing(store: Store) -> None:
    graph = Graph(extractor=RULES)
    with pytest.raises(Exception, match="entries of this task must not be stored"):
        learn(graph, store, "judge", ["The key is in the box."])
    learn(graph, store, "a", ["The key is in the box."])
    with pytest.raises(Exception, match="entries of this task must not be stored"):
        learn(graph, store, "judge", ["The key is in the box."])  # also where the fact is known already
    assert [e.origin.task for e in store.entries()] == ["a", "a"]


def test_a_full_disk_and_a_lock_are_told_and_nothing_of_the_step_is_stored(tmp_path: Path) -> None:
    graph, texts = Graph(extractor=RULES, max_new=400), [" ".join(f"k{i} is in the box{i}." for i in range(400))]
    with Store(tmp_path / "s", split="train", max_mb=0.07, busy_s=0.1) as small:
        learn(graph, small, "a", ["The key is in the box."])
        before = content_hash(small)
        with pytest.raises(StoreFull, match="no room"):
            learn(graph, small, "b", texts)
        assert content_hash(small) == before
        with (
            Store(tmp_path / "s", split="train", busy_s=0.1) as other,
            other.transaction(),
            pytest.raises(StoreLocked, match="locked by another process"),
        ):
            learn(graph, small, "c", ["The key is in the box."])
        assert content_hash(small) == before


@dataclass(frozen=True)
class Mine:
    """Rules of one's own: the first three words are a fact, and all before it are out of date."""

    def __call__(self, observation: str) -> list[list[str]]:
        return [observation.split()[:3], ["not", "three"]]

    def replaces(self, new: Any, old: Any) -> bool:
        return True


def test_rules_of_ones_own_and_what_they_say_that_is_no_fact(store: Store) -> None:
    graph = Graph(extractor=Mine())
    assert learn(graph, store, "a", ["one two three", "four five six"])["store/n_refused"] == 2
    assert known(store) == {"four, five, six"}


# --- contracts -------------------------------------------------------------------------------------------------------


def test_demonstrations_answer_what_the_rules_find() -> None:
    graph = Graph(extractor=RULES, teach=True, ask="?")
    agent = Remembering(inner=ChatAgent(system=""), store=graph)
    policy = Speaks(["go"] * 2, memory=['{"facts": [["key", "in", "box"]]}', "{}"])
    play(graph, None, ["The key is in the box.", "The key is on the table."], policy)
    asked = policy.asked[2][1]
    said = json.loads(agent.write(DemonstrationInputs("go", role="memory", asked=asked)))
    assert said == {"facts": [["key", "on", "table"]], "outdated": [1]}
    plain = Remembering(inner=ChatAgent(system=""), store=Graph(ask="?"))
    assert json.loads(plain.write(DemonstrationInputs("go", role="memory", asked=asked))) == {
        "facts": [],
        "outdated": [],
    }
    # A question of the inner agent's own memory is its own affair.
    assert agent.write(DemonstrationInputs("go", recall="so far", role="memory", asked="Summarise.")) == "so far"
    with pytest.raises(ValueError, match="teach is true without an extractor"):
        Graph(teach=True)


def test_it_is_an_agent_with_and_without_a_store(store: Store) -> None:
    for graph in (Graph(), Graph(extractor=RULES)):
        agent = Remembering(inner=ChatAgent(system=""), store=graph)
        assert isinstance(graph, StoreKind) and isinstance(graph, PerTurnRetrieval) and not asks_policy(graph)
        assert check_agent(agent).ok, str(check_agent(agent))
        assert agent.roles == (("", "memory") if graph.extractor is None else ("",))
        learn(Graph(extractor=RULES), store, "a", ["The key is in the box."])
        bound = Bound(agent, store)
        action = asyncio.run(bound.act(History(Task("z"), "the key"), Speaks(["go"], memory=["{}"])))
        assert action.text == "go" and "key, in, box" in action.notes[RECALLED]


def test_an_observation_whose_facts_are_all_gone_goes_with_them(store: Store) -> None:
    graph = Graph(extractor=RULES)
    learn(graph, store, "a", ["The key is in the box.", "The lamp is on the table.", "Done."])
    assert {e.text for e in store.entries("observation")} == {"The key is in the box.", "The lamp is on the table."}
    learn(graph, store, "b", ["The key is on the shelf.", "Done."])
    assert known(store) == {"key, on, shelf", "lamp, on, table"}
    assert {e.text for e in store.entries("observation")} == {"The key is on the shelf.", "The lamp is on the table."}
    # Likewise where facts go because there are too many: of these two, which are newer, the observations stay.
    learn(Graph(extractor=RULES, max_facts=2), store, "c", ["The cat is in the hall.", "Done."])
    assert known(store) == {"key, on, shelf", "cat, in, hall"}
    assert {e.text for e in store.entries("observation")} == {"The key is on the shelf.", "The cat is in the hall."}
