"""Episodes that begin in the middle: what is given is replayed, read and shown, and is nobody's doing."""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass, replace

import numpy as np
import pytest

from agents.chat import ChatAgent
from environments.base import StepResult
from rewards.shaping.outcome import EnvironmentReward
from rewards.shaping.penalties import TurnCost
from rlhf.batching.samples import make_samples
from rlhf.credit.grpo import GRPO
from rlhf.data import Action, Finish, Generation, Outcome, Prompt, SamplingParams, Score, Task, Turn
from rlhf.errors import DataError
from rlhf.evaluation.rows import TrajectoryRecord, encode
from rlhf.inference.scripted import ScriptedEngine
from rlhf.rollout.episode import Branch, run_episode
from rlhf.rollout.group import run_groups
from rlhf.rollout.limits import Limits
from rlhf.rollout.opponent_engine import OpponentEngine, turn_key
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.runner import RolloutBatch
from rlhf.rollout.scoring import WeightedReward, score_group
from rlhf.terminal import CleanConsole
from rlhf.viewer.redaction import Redaction
from rlhf.viewer.terminal import show_trajectory
from rlhf.viewer.trajectory import trajectory as page_of
from tests.rollout.small_world import Corridor, CorridorEpisode, tokenizer

LIMITS = Limits(max_turns=4)
TASK = Task("corridor/test/0", reference="secret")
AGENT = ChatAgent(system="")


def walk(n: int, *, first: int = 0, seed: int = 0, words: str = "go north") -> tuple[Turn, ...]:
    """`n` turns as a corridor answers them."""
    return tuple(
        Turn(Action(words), f"Room {i + 1} of {seed}.", state_key=f"room {i}") for i in range(first, first + n)
    )


def engine(says="go north"):
    return ScriptedEngine(says if callable(says) else lambda text: says, tokenizer=tokenizer())


def play(task, environment=None, *, says="go north", limits=LIMITS, agent=AGENT, **kwargs):
    parts = (environment or Corridor(length=5), agent, engine(says), Renderer(tokenizer()), limits, SamplingParams())
    return asyncio.run(run_episode(task, *parts, **kwargs))


# --- the task --------------------------------------------------------------------------------------------------------


def test_a_start_state_is_a_task_of_its_own():
    generation = Generation(Prompt((1,)), (2,), (0.0,), Finish.STOP, 0)
    turns = (*walk(1), Turn(Action("", (generation,), "say something"), "say something"), *walk(1, first=1))
    turns = tuple(replace(t, action=replace(t.action, generations=(generation,))) for t in turns)
    start = TASK.started_after(turns)
    # The turn that could not be read never reached the environment.
    assert (start.id, start.origin, start.prefix) == ("corridor/test/0@2", TASK.id, walk(2))
    assert start.beginning == TASK == TASK.beginning and start.reference == "secret"
    assert TASK.started_after(walk(2), mark="b").id == "corridor/test/0@2-b"
    assert TASK.started_after(()) is TASK
    with pytest.raises(DataError, match="in the middle already"):
        start.started_after(walk(1))
    with pytest.raises(DataError, match="a turn of a prefix has generations, and prefixes are not trained on"):
        replace(start, prefix=turns[:1])
    with pytest.raises(DataError, match="id of its own"):
        replace(TASK, prefix=walk(1))
    with pytest.raises(DataError, match="id of its own"):
        replace(start, id=TASK.id)


# --- the episode -----------------------------------------------------------------------------------------------------


def test_an_episode_goes_on_from_where_its_task_begins():
    @dataclass(frozen=True)
    class Strict(Corridor):
        def start(self, task):
            assert task == TASK, "an environment is given the tasks that it made"
            return super().start(task)

    start = TASK.started_after(walk(2))
    prompts = []
    got = play(start, Strict(length=4), says=lambda text: prompts.append(text) or "go north")
    assert (got.task_id, got.outcome, got.n_given, got.parent) == ("corridor/test/0@2", Outcome.SOLVED, 2, None)
    assert got.turns[:2] == walk(2) and got.own_turns == got.turns[2:] and len(got.turns) == 4
    assert [len(t.generations) for t in got.turns] == [0, 0, 1, 1]
    assert [t.state_key for t in got.turns] == ["room 0", "room 1", "room 2", "room 3"]
    # The policy reads what is given as if it had said it.
    said = (
        "<|im_start|>assistant\ngo north<|im_end|>\n<|im_start|>user\nRoom 2 of 0.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompts[0].endswith(said) and prompts[0].count("go north") == 2


def test_opponents_of_single_turns_are_counted_from_the_first_turn_of_its_own():
    opponents = {turn_key(0): OpponentEngine("step 2", engine())}
    got = play(TASK.started_after(walk(2)), Corridor(length=4), opponents=opponents)
    assert [[g.opponent for g in t.generations] for t in got.turns] == [[], [], ["step 2"], [""]]


def test_the_agent_sees_what_was_possible_in_given_turns():
    shown = ChatAgent(system="", show_admissible=True)
    prompts = []
    play(TASK.started_after(walk(2)), agent=shown, says=lambda text: prompts.append(text) or "go north")
    assert prompts[0].count("Possible actions:\n- go north\n- look") == 3


def test_given_turns_do_not_count_for_the_limit_on_turns():
    got = play(TASK.started_after(walk(3)), Corridor(length=50))
    assert (got.outcome, len(got.turns), len(got.own_turns)) == (Outcome.TURN_LIMIT, 7, 4)


@dataclass(frozen=True)
class Moody(Corridor):
    """A corridor that answers otherwise, ends, or breaks at the second step."""

    mood: str = ""

    def start(self, task):
        episode = super().start(task)
        step = episode.step

        async def moody(action):
            result = await step(action)
            if episode.place != 2:
                return result
            if self.mood == "breaks":
                raise RuntimeError("the corridor collapsed")
            changed = {
                "ends": {"terminated": True, "success": True},
                "is cut": {"truncated": True},
                "answers": {"reply": "Room 7."},
                "moves": {"state_key": "elsewhere"},
            }
            return replace(result, **changed[self.mood])

        episode.step = moody
        return episode


@pytest.mark.parametrize(
    ("mood", "n_given", "says"),
    [
        ("ends", 2, "replaying turn 2 of 2, 'go north': the environment ended the episode before the agent could act"),
        ("is cut", 3, "replaying turn 2 of 3, 'go north': the environment ended the episode"),
        ("answers", 2, "replaying turn 2 of 2, 'go north': the environment answered 'Room 7.', recorded is 'Room 2 of"),
        ("moves", 3, "replaying turn 3 of 3, 'go north': it began in state 'elsewhere', recorded is 'room 2'"),
        ("breaks", 2, "replaying turn 2 of 2, 'go north': step: RuntimeError: the corridor collapsed"),
    ],
)
def test_a_replay_that_goes_another_way_is_an_error_of_the_environment(mood, n_given, says):
    environment = Moody(length=5, mood=mood)
    start = TASK.started_after(walk(n_given))
    got = play(start, environment)
    assert got.outcome is Outcome.ENV_ERROR and says in got.detail, got.detail
    assert environment.counts.alive == 0
    # It is tried again, then a failure of the group: neither a reward nor a zero.
    parts = (environment, AGENT, engine(), Renderer(tokenizer()), LIMITS, SamplingParams())
    [attempts] = asyncio.run(run_groups([start], *parts, group_size=2, seed=0))
    assert [t.n_retries for t in attempts] == [LIMITS.max_retries] * 2
    group = asyncio.run(score_group(start, attempts, {"env": WeightedReward("env", 1.0, EnvironmentReward())}))
    assert not group.trajectories and [f.outcome for f in group.failures] == [Outcome.ENV_ERROR] * 2


def test_states_that_are_not_known_are_not_compared():
    turns = tuple(replace(t, state_key=None) for t in walk(2))
    assert play(TASK.started_after(turns)).outcome is Outcome.SOLVED


# --- what it is worth ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paid(Corridor):
    """Every step of the corridor is rewarded."""

    def start(self, task):
        return PaidEpisode(self, task)


class PaidEpisode(CorridorEpisode):
    async def step(self, action: str) -> StepResult:
        return replace(await super().step(action), reward=1.0)


def collected(start: Task, n: int = 2) -> RolloutBatch:
    parts = (Paid(length=5), AGENT, engine(), Renderer(tokenizer()), LIMITS, SamplingParams())
    [attempts] = asyncio.run(run_groups([start], *parts, group_size=n, seed=0))
    rewards = {
        "env": WeightedReward("env", 1.0, EnvironmentReward()),
        "cost": WeightedReward("cost", 1.0, TurnCost(cost=0.1)),
    }
    return RolloutBatch((asyncio.run(score_group(start, attempts, rewards)),), 1.0)


def test_given_turns_earn_nothing():
    found = collected(TASK.started_after(tuple(replace(t, reward=1.0) for t in walk(3))))
    [group] = found.groups
    assert group.task_id == "corridor/test/0@3"
    for score in group.scores:
        # Five rooms, three of them given: two turns of 1 each, at a cost of 0.1.
        assert score.turns == pytest.approx((0.0, 0.0, 0.0, 0.9, 0.9)) and score.total == pytest.approx(1.8)
        assert score.parts["env"].value == 2.0 and score.parts["cost"].value == pytest.approx(-0.2)
    metrics = found.metrics()
    assert metrics["rollout/n_turns_mean"] == 2.0 and metrics["rollout/n_replayed_turns"] == 6.0
    assert metrics["rollout/n_tokens"] == sum(t.n_tokens for t in group.trajectories)


def test_nothing_trains_on_what_is_given():
    # The poison is a word that stands in the given turns alone.
    poison = tuple(replace(t, action=Action("look look look")) for t in walk(2))

    @dataclass(frozen=True)
    class Lenient(Corridor):
        def start(self, task):
            episode = super().start(task)
            step = episode.step

            async def goes(action):
                return await step("go north")

            episode.step = goes
            return episode

    start = TASK.started_after(poison)
    parts = (Lenient(length=4), AGENT, engine(), Renderer(tokenizer()), LIMITS, SamplingParams())
    [attempts] = asyncio.run(run_groups([start], *parts, group_size=2, seed=0))
    scores = [Score({}, (0.0,) * len(t.turns), float(i)) for i, t in enumerate(attempts)]
    group = replace(collected(start, 0).groups[0], trajectories=tuple(attempts), scores=tuple(scores))
    samples, _ = make_samples([group], [GRPO()(group)])
    assert len(samples) == 2
    word = tokenizer().encode("look look look")
    for sample, trajectory in zip(samples, attempts, strict=True):
        ids = sample.token_ids.tolist()
        spots = [i for i in range(len(ids)) if ids[i : i + len(word)] == word]
        assert len(spots) == 2, "the policy reads both given turns"
        for i in spots:
            assert not sample.mask[i : i + len(word)].any() and not sample.advantages[i : i + len(word)].any()
        sampled = [token for g in trajectory.generations for token in g.token_ids]
        assert sample.token_ids[sample.mask].tolist() == sampled and np.abs(sample.advantages[sample.mask]).min() > 0


# --- branches --------------------------------------------------------------------------------------------------------


def test_a_branch_keeps_the_tokens_of_its_parent():
    start = TASK.started_after(walk(1))
    environment = Corridor(length=6)
    parent = play(start, environment, says=lambda text: "look" if text.count("user") % 2 else "go north")
    branch = Branch(parent.attempt, parent.turns[:3])
    prompts = []
    got = play(start, environment, says=lambda text: prompts.append(text) or "go north", attempt=5, branch=branch)
    assert (got.attempt, got.parent, got.n_given, got.n_shared) == (5, 0, 1, 3)
    assert all(mine is theirs for mine, theirs in zip(got.turns[:3], parent.turns[:3], strict=True))
    # The first prompt of its own is the one that the parent had there, token for token.
    assert got.generations[2].prompt == parent.generations[2].prompt and len(prompts) == len(got.own_turns)
    # Shared turns were the policy's, so they count for the limit: 1 given, 2 shared, 2 of its own.
    assert len(got.turns) == 5 and got.outcome is Outcome.TURN_LIMIT


def test_a_branch_passes_over_what_could_not_be_read():
    says = iter(["go north", "go north and then back", "go north", "go north"])
    parent = play(TASK, says=lambda text: next(says), agent=ChatAgent(system="", max_action_chars=10))
    assert parent.turns[1].action.error  # nothing was done in the second turn
    got = play(TASK, branch=Branch(0, parent.turns[:3]))
    assert got.turns[:3] == parent.turns[:3] and got.turns[3].state_key == "room 2"


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_reports_and_terminal_say_what_was_given_and_what_is_shared():
    start = TASK.started_after(walk(1))
    parent = play(start, Corridor(length=6))
    made = play(start, Corridor(length=6), attempt=1, branch=Branch(0, parent.turns[:3]))
    record = TrajectoryRecord(1, "0-policy_gradient", "train", made.task_id, made)
    shown = page_of(encode(record), None, Redaction(), "run")
    assert [turn["how"] for turn in shown["turns"]] == ["given", "shared", "shared", "", ""]
    assert shown["parent"] == 0 and shown["turns"][0]["action"] == "go north"
    console = CleanConsole(file=io.StringIO(), width=200)
    show_trajectory(record, console)
    lines = [line for line in console.file.getvalue().splitlines() if " > go north" in line]
    assert [line.split("go north")[1].strip() for line in lines] == ["given", "shared", "shared", "", ""]
