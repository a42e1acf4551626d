"""`docs/promises.md`: every row names tests that exist; and the tests of whole runs behind some of the rows."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agents.base import Agent
from agents.chat import ChatAgent
from agents.memory.window import Window
from environments.base import Environment, Properties
from rlhf.batching.samples import make_samples
from rlhf.cli import app
from rlhf.credit.grpo import GRPO
from rlhf.data import Credit, Outcome, SamplingParams, ScoredGroup, Task, Trajectory
from rlhf.errors import RecipeError
from rlhf.estimate.arithmetic import arithmetic
from rlhf.evaluation.evaluate import Evaluation, evaluate
from rlhf.evaluation.rows import TrajectoryRecord
from rlhf.evaluation.store import read_trajectories
from rlhf.evaluation.transcript import load_tokenizer
from rlhf.inference.scripted import ScriptedEngine
from rlhf.recipe import load
from rlhf.rollout.limits import Limits
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.runner import RolloutBatch, RolloutRunner
from rlhf.rollout.scoring import WeightedReward
from rlhf.sinks import read_metrics
from tests import faulty_world
from tests.rollout.small_world import CHATML, INLINE, THINKING, Corridor, tokenizer
from tests.training.tiny import ones

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "promises.md"
ROWS = range(1, 22)
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
THREAD = re.compile(r"[\w.-]+(?:#| PR )\d+")


# --- the page --------------------------------------------------------------------------------------------------------


@cache
def page_rows() -> dict[int, list[str]]:
    """The cells of each numbered row, those of its row in the second table behind those of the first."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\|\s*\d+\s*\|", line)]
    rows: dict[int, list[str]] = {}
    for line in lines:
        number, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows.setdefault(int(number), []).extend(cells)
    return rows


@cache
def names_in(path: str) -> frozenset[str]:
    """Names of the test functions of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, functions) and "test" in node.name)


def test_every_row_is_there() -> None:
    assert sorted(page_rows()) == list(ROWS)


@pytest.mark.parametrize("number", ROWS)
def test_a_row_says_what_is_promised_and_names_tests_that_exist(number: int) -> None:
    wrong, where, promised, proven = page_rows()[number]
    assert len(wrong) > 20 and len(promised) > 20
    assert THREAD.search(where), where
    named = REFERENCE.findall(proven)
    assert named, proven
    for path, name in named:
        assert (ROOT / path).is_file(), path
        assert name in names_in(path), f"{path} has no {name}"
    # Nothing but references stands in the cell: a name with a slip in it would otherwise be read as prose.
    assert REFERENCE.sub("", proven).replace("<br>", "").strip() == ""


def test_every_test_that_the_page_names_exists() -> None:
    for path, name in REFERENCE.findall(PAGE.read_text(encoding="utf-8")):
        assert name in names_in(path), f"{path} has no {name}"


def test_every_row_of_what_attacks_found_names_tests_that_exist() -> None:
    rows = PAGE.read_text(encoding="utf-8").partition("## Found by fault injection")[2].splitlines()
    rows = [line for line in rows if line.startswith("| ")][1:]
    assert rows
    for wrong, promised, proven in (line.strip("|").split("|") for line in rows):
        assert len(wrong) > 20 and len(promised) > 20
        named = REFERENCE.findall(proven)
        assert named and all(name in names_in(path) for path, name in named), proven
        assert REFERENCE.sub("", proven).replace("<br>", "").strip() == ""


# --- a whole run, made to show what must not stay silent -------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A finished run and the recipe it came from."""

    recipe: Path
    folder: Path
    result: dict[str, Any]
    said: str

    def values(self, name: str, stage: str = "1-policy_gradient") -> list[float]:
        """What the steps of a stage logged under `name`."""
        lines = [line for line in read_metrics(self.folder / "metrics.jsonl") if line.stage == stage]
        return [value for line in lines if (value := line.values.get(name)) is not None]

    @property
    def records(self) -> list[TrajectoryRecord]:
        """Every trajectory that was trained on."""
        return list(read_trajectories(self.folder / "trajectories", phase="train"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("promises")
    recipe = faulty_world.write(folder)
    done = CliRunner().invoke(app, ["train", str(recipe), "--out", str(folder / "run"), "--json"])
    assert done.exit_code == 0, done.output
    return Trained(recipe, folder / "run", json.loads(done.stdout.splitlines()[-1]), done.stderr)


def test_what_show_computes_is_what_a_run_makes(trained: Trained) -> None:
    figures = arithmetic(load(trained.recipe))
    supervised, improved = figures["stages"]
    assert len(trained.values("supervised/loss", "0-supervised")) == supervised["n_updates"] == 6  # 2 x ceil(10 / 4)
    assert trained.values("rollout/n_episodes") == [improved["episodes_per_step"]] * improved["n_steps"] == [12, 12]
    assert trained.result["n_episodes"] == improved["n_episodes"] == 24
    per_step = improved["updates_per_step"]  # 2 epochs x 3 minibatches
    assert trained.values("optimizer/n_updates") == [per_step, 2 * per_step] == [6, 12]
    assert improved["n_updates"] == 12
    for n_samples, n_tokens in zip(trained.values("batch/n_samples"), trained.values("rollout/n_tokens"), strict=True):
        # Nobody climbs three steps in three turns by chance alone in every attempt, so most attempts use all turns.
        assert 0 < n_samples <= improved["max_samples_per_step"] == 36  # 12 episodes x 3 turns
        assert 0 < n_tokens <= improved["max_sampled_tokens_per_step"] == 72  # x 2 tokens
    evaluated = json.loads((trained.folder / "result.json").read_text())
    for when in ("before", "after"):
        assert evaluated[when]["n"] + evaluated[when]["n_errors"] == figures["evaluation"]["n_episodes"] == 5


def test_rewritten_prompts_are_counted_and_shown(trained: Trained) -> None:
    for step, counted in enumerate(trained.values("batch/n_rewritten_prompts"), start=1):
        trajectories = [r.trajectory for r in trained.records if r.step == step]
        pairs = [pair for t in trajectories for pair in itertools.pairwise(t.generations)]
        assert counted == sum(not Renderer.extends(before, after.prompt) for before, after in pairs) == len(pairs) > 0
    assert "batch/n_rewritten_prompts" in (trained.folder / "report.html").read_text()


def test_cut_replies_are_counted_and_the_key_is_named(trained: Trained) -> None:
    counted = trained.values("rollout/n_truncated_generations")
    finishes = [[g.finish for r in trained.records if r.step == s for g in r.trajectory.generations] for s in (1, 2)]
    assert counted == [sum(f == "length" for f in step) for step in finishes]
    assert sum(counted) > 0
    assert "by limits.max_tokens: 2" in " ".join(trained.said.split())  # the terminal wraps its lines
    assert "raise limits.max_tokens (now 2)" in (trained.folder / "report.html").read_text()


def test_a_whole_run_trains_on_the_ids_that_were_sampled(trained: Trained) -> None:
    made: Any = load_tokenizer(trained.folder)
    strange = 0
    for record in trained.records:
        samples, _ = make_samples(*_alone(record), "generation")
        generations = [g for g in record.trajectory.generations if g.token_ids]
        for sample, generation in zip(samples, generations, strict=True):
            assert tuple(sample.token_ids[sample.mask]) == generation.token_ids
            assert sample.sampler_logprobs[sample.mask].tolist() == pytest.approx(generation.logprobs)
            text = made.decode(list(generation.token_ids), skip_special_tokens=False)
            again = made.encode(text, add_special_tokens=False).ids
            strange += tuple(again) != generation.token_ids
    # An untrained policy says things that a tokenizer would spell otherwise: a round trip through text would show.
    assert strange > 0


def _alone(record: TrajectoryRecord) -> tuple[list[Any], list[Credit]]:
    assert record.score is not None
    made = ScoredGroup(record.task_id, (record.trajectory,), (record.score,))
    return [made], ones([made])


def test_an_environment_that_crashes_stops_the_run_with_its_own_words(tmp_path: Path) -> None:
    recipe = faulty_world.write(tmp_path / "fragile")
    words = ["train", str(recipe), "environment.is_fragile=true", "--out", str(tmp_path / "run"), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "Traceback" not in done.output
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert error["type"] == "TrainingError"
    assert "env_error: step: RuntimeError: the stairs broke (stairs.py:" in error["what"]
    assert "limits.max_error_fraction" in error["expected"] and "env_error" in error["got"]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {line.stage for line in lines} == {"0-supervised"}  # no step was trained on crashes, nor scored


# --- rollouts with a scripted policy ---------------------------------------------------------------------------------


def collect(
    environment: Environment,
    agent: Agent,
    say: Callable[[str], str],
    *,
    rewards: dict[str, WeightedReward] | None = None,
    limits: Limits | None = None,
    template: str = CHATML,
    group_size: int = 3,
    n_tasks: int = 4,
) -> RolloutBatch:
    made = collector(environment, agent, say, rewards=rewards, limits=limits, template=template)
    tasks = list(environment.tasks("train"))[:n_tasks]
    sampling = SamplingParams(max_tokens=32)
    return asyncio.run(made.collect(tasks, group_size=group_size, sampling=sampling, step=0))


def collector(
    environment: Environment,
    agent: Agent,
    say: Callable[..., str],
    *,
    rewards: dict[str, WeightedReward] | None = None,
    limits: Limits | None = None,
    template: str = CHATML,
    seeded: bool = False,
) -> RolloutRunner:
    return RolloutRunner(
        environment=environment,
        agent=agent,
        rewards=rewards or {"solved": WeightedReward("solved", 1.0, lambda task, trajectory: float(trajectory.solved))},
        engine=ScriptedEngine(say, tokenizer=tokenizer(template), seeded=seeded),
        renderer=Renderer(tokenizer(template)),
        limits=limits or Limits(max_turns=5, max_tokens=32),
        seed=0,
    )


def test_a_template_that_strips_reasoning_costs_nothing_and_forgetting_is_counted() -> None:
    thinker = ChatAgent(system="", think="allow")

    def samples_of(agent: ChatAgent) -> tuple[list[Trajectory], list[Any], float]:
        found = collect(Corridor(), agent, lambda text: "<think>\nnorth\n</think>\n\ngo north", template=THINKING)
        credits = [GRPO()(made) for made in found.groups]
        samples, counters = make_samples(found.groups, credits, "trajectory")
        trajectories = [t for made in found.groups for t in made.trajectories]
        assert all(t.solved for t in trajectories)
        return trajectories, samples, counters["batch/n_rewritten_prompts"]

    trajectories, samples, n_rewritten = samples_of(thinker)
    assert len(samples) == len(trajectories) == 12 and n_rewritten == 0
    for trajectory, sample in zip(trajectories, samples, strict=True):
        sampled = [i for generation in trajectory.generations for i in generation.token_ids]
        assert sample.token_ids[sample.mask].tolist() == sampled
    # With a window of one turn the third prompt of each of the 12 attempts no longer extends the second.
    _, rows, n_rewritten = samples_of(replace(thinker, memory=Window(turns=1)))
    assert n_rewritten == 12 and len(rows) == 24


@dataclass(frozen=True)
class Rickety:
    """A corridor that falls in on every third task."""

    properties: Properties = INLINE

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"rickety/{i}", seed=i) for i in range(9)]

    def start(self, task: Task) -> Any:
        if task.seed % 3 == 0:
            raise OSError("the ceiling fell in")
        return Corridor().start(task)


def test_a_crash_is_neither_scored_nor_trained_on_and_ends_nothing_else() -> None:
    limits = Limits(max_turns=5, max_retries=2, max_error_fraction=0.5)
    found = collect(Rickety(), ChatAgent(system=""), lambda text: "go north", limits=limits, n_tasks=9)
    metrics = found.metrics()
    # Tasks 0, 3 and 6 fail for good, in all 3 attempts; the other 6 are solved.
    assert (metrics["rollout/n_env_error"], metrics["rollout/n_solved"], metrics["rollout/n_episodes"]) == (9, 18, 27)
    assert metrics["rollout/success"] == 1 and metrics["rollout/return_mean"] == 1  # a crash is not a zero
    failures = [failure for made in found.groups for failure in made.failures]
    assert {f.outcome for f in failures} == {Outcome.ENV_ERROR} and all(f.retryable for f in failures)
    assert all("the ceiling fell in" in f.message for f in failures)
    samples, counters = make_samples(found.groups, [GRPO()(made) for made in found.groups])
    assert len(samples) == 18 and {s.group for s in samples} == {1, 2, 4, 5, 7, 8}
    assert counters["batch/n_trajectories_without_tokens"] == 0


# --- keys that must not be ignored -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "where", "why"),
    [
        (["agent.max_admissible=9"], "agent.max_admissible", "show_admissible is false"),
        (
            ["stages.1.advantage={kind: grpo, normalize_std: false, eps: 0.1}"],
            "stages[1].advantage.eps",
            "normalize_std",
        ),
        (
            ["stages.1.advantage={kind: gigpo, normalize: mean, ddof: 0}"],
            "stages[1].advantage.ddof",
            "normalize is mean",
        ),
        (
            ["stages.1.advantage={kind: gigpo, step_weight: 0, gamma: 1}"],
            "stages[1].advantage.gamma",
            "step_weight is 0",
        ),
        (["evaluation.validation_n_tasks=9"], "evaluation.validation_n_tasks", "no stage sets evaluate_every"),
        (["stages.1.optimizer.min_lr_ratio=0.1"], "stages[1].optimizer.min_lr_ratio", "the schedule is constant"),
        (["stages.0.unsolved_share=1"], "stages[0].random_share", "unsolved_share is 1"),
        (["stages.1.reduction.per=row"], "stages[1].reduction", "per: row has no effect"),
        (["stages.1.loss={kind: ppo_clip, kl_coef: 0.1}"], "stages[1].loss", "kl_coef: 0.1 has no effect"),
    ],
)
def test_a_key_that_would_be_ignored_is_an_error(tmp_path: Path, overrides: list[str], where: str, why: str) -> None:
    recipe = faulty_world.write(tmp_path / "quiet")
    with pytest.raises(RecipeError) as caught:
        load(recipe, overrides)
    assert caught.value.where == where
    assert why in caught.value.expected and "no effect" in str(caught.value)


def test_the_same_key_is_fine_where_it_has_an_effect(tmp_path: Path) -> None:
    heard = ["agent.max_admissible=9", "agent.show_admissible=true", "stages.1.evaluate_every=1"]
    heard += [
        "evaluation.validation_n_tasks=9",
        "evaluation.validation_split=test",
        "stages.1.advantage={kind: gigpo, gamma: 1}",
    ]
    assert load(faulty_world.write(tmp_path / "heard"), heard).evaluation.validation_n_tasks == 9


def test_the_time_limit_of_rewards_is_heeded() -> None:
    def slow(task: Task, trajectory: Trajectory) -> float:
        time.sleep(0.5)
        return 1.0

    limits = Limits(max_turns=5, reward_timeout_s=0.05, max_error_fraction=1.0)
    found = collect(
        Corridor(), ChatAgent(), lambda text: "go north", rewards={"slow": WeightedReward("slow", 1.0, slow)},
        limits=limits, group_size=1, n_tasks=1,
    )  # fmt: skip
    [failure] = found.groups[0].failures
    assert failure.outcome is Outcome.REWARD_ERROR and "0.05 s" in failure.message


def test_the_seed_of_an_evaluation_is_its_own() -> None:
    def evaluated(run_seed: int, evaluation_seed: int) -> list[str]:
        made = collector(Corridor(), ChatAgent(), lambda text, rng: rng.choice(["look", "go north"]), seeded=True)
        settings = Evaluation(split="test", n_tasks=6, seed=evaluation_seed)
        result = asyncio.run(evaluate(replace(made, seed=run_seed), settings))
        return [turn.action.text for g in result.collected.groups for t in g.trajectories for turn in t.turns]

    assert evaluated(0, 7) == evaluated(1, 7)
    assert evaluated(0, 7) != evaluated(0, 8)
