"""What would be missed in the first rollout is refused before anything is played or trained."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rewards.combinators.parts import compared_in
from rlhf.build.preflight import refuse_without_references, tell_few_tasks, try_once
from rlhf.build.train import train
from rlhf.commands.check_availability import models_of, refuse_unreachable_models
from rlhf.data import Task
from rlhf.errors import EnvError, ModelError, RecipeError, RewardError
from rlhf.evaluation.store import read_trajectories
from rlhf.recipe import Recipe, load
from rlhf.rollout.episode import UNDECIDED
from rlhf.training.policy.model import FromScratch
from rlhf.training.policy.model_files import BASE_FOLDER
from tests import commands
from tests.training import runs

STAGES = [
    {"kind": "supervised", "n_demonstrations": 4, "epochs": 1},
    {"kind": "policy_gradient", "steps": 1, "tasks_per_step": 2, "group_size": 2},
]
#: The levers of a bandit are no question with an answer.
BANDIT = {"kind": "bandit"}
MATH = {"kind": "math"}
PARTS = {
    "answers": {"environment": {"kind": "./words.py:Words"}},
    "levers": {"environment": BANDIT},
}


def refused(folder: Path, rewards: dict[str, Any], **changes: Any) -> RecipeError:
    with pytest.raises(RecipeError) as error:
        refuse_without_references(load(runs.write(folder, STAGES, rewards=rewards, **changes)))
    return error.value


def test_a_verifier_without_references_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    recipe = load(runs.write(tmp_path, STAGES, environment=BANDIT, rewards={"right": MATH}))
    with pytest.raises(RecipeError) as error:
        train(recipe, tmp_path / "run")
    assert error.value.where == "rewards.right.kind"
    assert error.value.got.startswith(
        "tasks without reference: 16 of the first 16 of the split 'train', such as bandit"
    )
    assert "a reward of (task, trajectory)" in error.value.hint
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("reward", "where"),
    [
        ({"kind": "exact_match"}, "rewards.right.kind"),
        ({"kind": "combine", "parts": {"own": {"reward": MATH}}}, "rewards.right.parts.own.reward.kind"),
        ({"kind": "concise", "correct": MATH}, "rewards.right.correct.kind"),
        ({"kind": "math", "monitor": True}, "rewards.right.kind"),
    ],
)
def test_it_is_found_wherever_it_is_asked(tmp_path: Path, reward: dict[str, Any], where: str) -> None:
    rewards = {"solved": {"kind": "outcome"}, "right": reward}
    assert refused(tmp_path, rewards, environment=BANDIT).where == where


def test_one_part_of_a_mixture_may_have_them(tmp_path: Path) -> None:
    mixed = {"kind": "mixed", "parts": PARTS}
    refuse_without_references(
        load(
            runs.write(
                tmp_path,
                STAGES,
                environment=mixed,
                rewards={"right": {"kind": "of_part", "part": "answers", "reward": MATH}},
            )
        )
    )
    of_levers = {"kind": "of_part", "part": "levers", "reward": MATH}
    assert refused(tmp_path, {"right": of_levers}, environment=mixed).where == "rewards.right.reward.kind"
    assert "8 of the first 16" in refused(tmp_path, {"right": MATH}, environment=mixed).got
    watched = runs.write(
        tmp_path, STAGES, environment=mixed, rewards={"r": {"kind": "outcome"}, "w": MATH | {"monitor": True}}
    )
    refuse_without_references(load(watched))


def test_as_many_may_lack_one_as_attempts_may_fail(tmp_path: Path) -> None:
    mixed = {"kind": "mixed", "parts": PARTS}
    limits = {"max_turns": 3, "max_tokens": 6, "max_error_fraction": 0.5}
    recipe = runs.write(tmp_path, STAGES, environment=mixed, rewards={"right": MATH}, limits=limits)
    refuse_without_references(load(recipe))


def test_a_reward_speaks_for_what_it_holds() -> None:
    def judge(answer: str, reference: str) -> float:
        return float(answer == reference)

    class Held:
        needs_reference = False

        def __call__(self, task: Task, trajectory: Any) -> float:
            return 0.0

    assert list(compared_in("r", [judge, Held()], Task("a"))) == ["r[0]"]
    assert list(compared_in("r", {"judge": judge}, None)) == ["r.judge"]


def test_tools_for_a_template_that_knows_none_are_refused(tmp_path: Path) -> None:
    """The template `plain` writes messages and no tools."""
    inner = {"kind": "tools", "tool_format": "hermes", "tool_definitions": "chat_template"}
    FromScratch(hidden_size=16, n_layers=1, n_heads=1).build(0, ["a"]).save(tmp_path / "made")
    policy = {"kind": "pretrained", "path": str(tmp_path / "made"), "template": "plain"}
    stages = STAGES[1:]
    recipe = load(runs.write(tmp_path, stages, policy=policy, environment={"kind": "tools"}, agent=inner))
    with pytest.raises(RecipeError) as error:
        train(recipe, tmp_path / "run")
    assert error.value.where == "agent.tool_definitions"
    assert "agent.tool_definitions: system_prompt" in error.value.hint
    assert not (tmp_path / "run").exists()
    agent = {"kind": "remembering", "inner": inner}
    held = load(runs.write(tmp_path, stages, policy=policy, environment={"kind": "tools"}, agent=agent))
    with pytest.raises(RecipeError) as error:
        train(held, tmp_path / "run")
    assert error.value.where == "agent.inner.tool_definitions"


NAME_ERROR = """
def reward(task, trajectory):
    return len(trajectory.turns) * facter
"""
GOOD = '''
calls = []


class Counting:
    """A reward that keeps state, which the trial may not change."""

    def __init__(self):
        self.seen = []

    def __call__(self, task, trajectory):
        self.seen.append(task.id)
        return float(len(self.seen))
'''


def own(tmp_path: Path, text: str, name: str, **more: Any) -> Any:
    (tmp_path / "own.py").write_text(text)
    return load(runs.write(tmp_path, STAGES, rewards={"own": {"kind": f"./own.py:{name}", **more}}))


def test_a_reward_with_a_mistake_is_told_of_before_any_update(tmp_path: Path) -> None:
    recipe = own(tmp_path, NAME_ERROR, "reward")
    with pytest.raises(RewardError) as error:
        train(recipe, tmp_path / "run")
    assert "facter" in error.value.got and error.value.where.startswith("rewards.own")
    assert not (tmp_path / "run").exists()


def test_a_function_of_lists_that_judges_one_attempt_alone_is_told_of(tmp_path: Path) -> None:
    text = "def reward(completions, **kwargs):\n    return [1.0]\n"
    with pytest.raises(RewardError) as error:
        asyncio.run(try_once(own(tmp_path, text, "reward")))
    assert "did not return one number per completion; got: 1 numbers; expected: a list of 2 numbers" in error.value.got
    (tmp_path / "right").mkdir()
    asyncio.run(try_once(own(tmp_path / "right", text.replace("[1.0]", "[1.0 for _ in completions]"), "reward")))


def test_a_monitored_reward_that_fails_is_told_of_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(NAME_ERROR)
    rewards = {"environment": {"kind": "environment"}, "own": {"kind": "./own.py:reward", "monitor": {}}}
    said: list[str] = []
    asyncio.run(try_once(load(runs.write(tmp_path, STAGES, rewards=rewards)), said.append))
    assert len(said) == 1 and "own fails" in said[0] and "facter" in said[0]


@pytest.mark.parametrize(
    "advantage",
    [
        {"kind": "hrpo", "reward": "right"},
        {"kind": "two_level", "executor_reward": "right"},
        {"kind": "two_level", "executor": {"kind": "hrpo", "reward": "right"}},
    ],
)
def test_a_reward_without_values_per_turn_is_told_of_where_an_estimator_reads_them(
    tmp_path: Path, advantage: dict[str, Any]
) -> None:
    def made(kind: str) -> Recipe:
        rewards = {"right": {"kind": kind}, "success": {"kind": "outcome"}}
        stages = [STAGES[0], STAGES[1] | {"advantage": advantage}]
        agent = {"kind": "planner"} if advantage["kind"] == "two_level" else runs.BASE["agent"]
        return load(runs.write(tmp_path, stages, rewards=rewards, agent=agent))

    asyncio.run(try_once(made("environment")))
    with pytest.raises(RecipeError, match="reads values per turn") as error:
        asyncio.run(try_once(made("outcome")))
    assert error.value.where == "rewards.right"


def test_a_trial_leaves_no_trace_in_a_reward(tmp_path: Path) -> None:
    recipe = own(tmp_path, GOOD, "Counting")
    asyncio.run(try_once(recipe))
    assert recipe.rewards["own"].reward.seen == []


WORLD = """
import json
from environments.base import StepResult
from rlhf.data import Task


class Episode:
    opening = StepResult("Go.")

    async def step(self, action):
        return StepResult("Gone.", terminated=True, success=True)

    async def close(self):
        pass


class World:
    def tasks(self, split):
        return [Task(id=f"world/{split}/{i}") for i in range(40)]

    def start(self, task):
        return Episode()
"""
AWAIT = "; make the function an `async def`, and `await` in it (world.py:11)"
STEP, START = 'return StepResult("Gone.", terminated=True, success=True)', "return Episode()"


@pytest.mark.parametrize(
    ("line", "instead", "place", "said"),
    [
        (START, "raise RuntimeError('no game today')", "", "start: RuntimeError: no game today (world.py:22)"),
        (STEP, "__import__('asyncio').run(self.close())", "", AWAIT),
        (STEP, "__import__('asyncio').new_event_loop().run_until_complete(self.close())", "", AWAIT),
        (START, "json.loads('no')", "", "(world.py:22)"),  # raised in Python's library, by this line
        (START, "pass", "start (world.py:21)", "NoneType without step and close"),
        ("close", "shut", "start (world.py:21)", "Episode without close"),
        ("(self, action)", "(self)", "", "takes 1 positional argument but 2 were given"),
        (STEP, "raise RuntimeError('cannot move')", "", "step: RuntimeError: cannot move (world.py:11)"),
        (STEP, "pass", "step (world.py:10)", "None"),
        (STEP, 'return "Gone.", 1.0, True, {}', "step (world.py:10)", "tuple of 4"),
        (STEP, 'return StepResult("Gone.", reward="much")', "step (world.py:10)", "str 'much'"),
        ('StepResult("Go.")', '"Go."', "opening (world.py:21)", "str 'Go.'"),
    ],
)
def test_a_fault_of_an_environment_is_told_once_with_its_line_before_anything_is_trained(
    tmp_path: Path, line: str, instead: str, place: str, said: str
) -> None:
    (tmp_path / "world.py").write_text(WORLD.replace(line, instead))
    recipe = load(runs.write(tmp_path, STAGES[1:], environment={"kind": "./world.py:World"}))
    with pytest.raises(EnvError) as error:
        train(recipe, tmp_path / "run")
    assert error.value.where == "environment, world/train/0" + (f", {place}" if place else "")
    assert error.value.got.endswith(said) and "\n" not in error.value.got + error.value.what
    assert error.value.expected and f"`rlhf check environment {tmp_path}/world.py:World`" in error.value.hint


@pytest.mark.parametrize(("declared", "got"), [("{'deterministic': True}", "dict"), ("None", ""), ("Properties()", "")])
def test_properties_of_another_type_are_told_of_and_the_run_goes_on(tmp_path: Path, declared: str, got: str) -> None:
    text = WORLD.replace("import StepResult", "import Properties, StepResult")
    (tmp_path / "world.py").write_text(text.replace("class World:", f"class World:\n    properties = {declared}\n"))
    said: list[str] = []
    recipe = load(runs.write(tmp_path, STAGES[1:], environment={"kind": "./world.py:World"}))
    asyncio.run(try_once(recipe, said.append))
    assert [text.partition(",")[0] for text in said] == [f"caution: environment.properties is {got}"] * bool(got)


@pytest.mark.parametrize(
    ("success", "rewards", "n_said"), [(None, {}, 1), (False, {}, 0), (None, {"success_threshold": 1.0}, 0)]
)
def test_an_environment_that_never_says_what_is_solved_is_told_of_once(
    tmp_path: Path, success: bool | None, rewards: dict[str, Any], n_said: int
) -> None:
    (tmp_path / "world.py").write_text(WORLD.replace("success=True", f"success={success}"))
    stage = {**STAGES[1], "steps": 2}
    own = {"all": {"kind": "environment", **rewards}}
    done = runs.run(
        runs.write(tmp_path, [stage], environment={"kind": "./world.py:World"}, rewards=own), tmp_path / "run"
    )
    assert done.said.count("did not say whether the task was solved: return success=True or False with") == n_said
    details = {record.trajectory.detail for record in read_trajectories(done.folder / "trajectories")}
    assert (UNDECIDED in details) is bool(n_said), "what a reward decides is decided"


@pytest.mark.parametrize(
    ("advantage", "opening", "named"),
    [
        ({"kind": "gigpo"}, 'StepResult("Go.")', ["gigpo"]),
        ({"kind": "hgpo"}, 'StepResult("Go.")', ["hgpo"]),
        ({"kind": "gigpo"}, 'StepResult("Go.", state_key="start")', []),
        ({"kind": "gigpo", "step_weight": 0.0}, 'StepResult("Go.")', []),
        ({"kind": "grpo"}, 'StepResult("Go.")', []),
    ],
)
def test_an_estimator_that_compares_states_of_an_environment_that_names_none_is_told_of(
    tmp_path: Path, advantage: dict[str, Any], opening: str, named: list[str]
) -> None:
    (tmp_path / "world.py").write_text(WORLD.replace('StepResult("Go.")', opening))
    said: list[str] = []
    stages = [STAGES[1] | {"advantage": advantage}]
    recipe = load(runs.write(tmp_path, stages, environment={"kind": "./world.py:World"}))
    asyncio.run(try_once(recipe, said.append))
    assert [text.partition(" compares")[0] for text in said] == [
        f"caution: stages[0].advantage, {kind}," for kind in named
    ]
    assert all("world/train/0 names no state" in text for text in said)


def test_more_tasks_than_there_are_is_said_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    world = {"kind": "./world.py:World"}
    stage, judged = {**STAGES[1], "tasks_per_step": 50}, {"n_tasks": 60, "allow_overlap": True}
    said: list[str] = []
    tell_few_tasks(load(runs.write(tmp_path, [stage], environment=world, evaluation=judged)), said.append)
    assert said == [
        "caution: evaluation.n_tasks is 60, and the split 'test' has 40 tasks: no more are attempted",
        "caution: stages[0].tasks_per_step is 50, and the split 'train' has 40 tasks: each step attempts tasks more "
        "than once; write 40, or add tasks",
    ]
    said.clear()
    tell_few_tasks(load(runs.write(tmp_path, STAGES[1:], environment=world, evaluation={"n_tasks": 40})), said.append)
    assert said == []


@pytest.mark.parametrize(("listed", "got"), [("pass", "None"), ("return ['a']", "str 'a'"), ("return []", "nothing")])
def test_what_lists_no_tasks_is_told_with_its_line(tmp_path: Path, listed: str, got: str) -> None:
    line = next(line.strip() for line in WORLD.splitlines() if "return [Task" in line)
    (tmp_path / "world.py").write_text(WORLD.replace(line, listed))
    recipe = load(runs.write(tmp_path, STAGES[1:], environment={"kind": "./world.py:World"}))
    with pytest.raises(EnvError) as error:
        train(recipe, tmp_path / "run")
    assert (error.value.where, error.value.got) == ("World.tasks('test') (world.py:18)", got)
    assert error.value.expected and error.value.hint


@pytest.fixture
def silent_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that is out of order: the files that it is asked for."""
    from huggingface_hub import constants

    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(503)

        def log_message(self, *told: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield asked
        server.shutdown()


def test_a_model_that_cannot_be_had_is_told_of_by_its_key_after_one_request(
    tmp_path: Path, silent_hub: list[str]
) -> None:
    judge = {"kind": "judge", "path": "nobody/has-this", "question": "Is it good?"}
    recipe = load(runs.write(tmp_path, STAGES, rewards={"judge": judge}))
    assert list(models_of(recipe)) == [("rewards.judge.path", "nobody/has-this")]
    with pytest.raises(ModelError) as error:
        refuse_unreachable_models(recipe)
    assert error.value.where.startswith("rewards.judge") and error.value.got.startswith("nobody/has-this")
    assert silent_hub == ["/nobody/has-this/resolve/main/config.json"]


@pytest.mark.parametrize("named", ["models/mine", "./models/mine", "my model/x"])
def test_a_folder_that_is_not_there_is_told_of_with_one_of_a_similar_name(
    tmp_path: Path, silent_hub: list[str], monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    near = tmp_path / named.replace("mine", "mine-sft").replace("/x", "/xy")
    near.mkdir(parents=True)
    shutil.copy(BASE_FOLDER / "config.json", near)
    monkeypatch.chdir(tmp_path)
    policy = {"kind": "pretrained", "path": named}
    said = commands.run("show", runs.write(tmp_path, STAGES[1:], policy=policy)).output
    assert "did you mean" in said and near.name in said
    assert ("rlhf train would refuse this: policy.path" in said) is (named == "models/mine")
    assert set(silent_hub) <= {"/models/mine/resolve/main/config.json"}


def test_generations_longer_than_the_context_of_a_pretrained_model_are_told_of(tmp_path: Path) -> None:
    policy, told = {"kind": "pretrained", "path": str(BASE_FOLDER)}, "limits.max_tokens: one generation would fill"
    path = runs.write(tmp_path, STAGES[1:], policy=policy)
    for override, cautioned in (("limits.max_tokens=100000", 1), ("limits.max_tokens=8", 0)):
        cautions = commands.last_json(commands.run("show", path, override, "--json"))["cautions"]
        assert sum(told in caution for caution in cautions) == cautioned


def test_models_of_the_rewards_of_a_stage_are_named_too(tmp_path: Path) -> None:
    judge = {"kind": "judge", "path": "nobody/has-this", "question": "Is it good?"}
    recipe = load(runs.write(tmp_path, [{**STAGES[-1], "rewards": {"judge": judge}}]))
    [(where, named)] = models_of(recipe)
    assert where.startswith("stages") and where.endswith("path") and named == "nobody/has-this"
