"""Data of supervised stages: read before models load, tokenized before training."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agents.base import Capabilities
from agents.memory.base import DemonstrationInputs
from agents.tool_calls import Style
from agents.tools import ToolAgent
from environments.tasks.dataset import digest_of
from rewards.combinators.parts import with_parts
from rlhf.build.contamination import caution_learnt
from rlhf.data import Action, Task, Trajectory
from rlhf.data.task import origin_of
from rlhf.data.trajectory import SEAT
from rlhf.errors import RecipeError
from rlhf.evaluation.folder import where_to_look
from rlhf.evaluation.store import list_steps, read_trajectories
from rlhf.recipe import Recipe
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.tasks import tasks_of
from rlhf.training.stages.chat_files import Chat, read_chats
from rlhf.training.stages.chat_rows import DataRows, chat_samples, prompt_of, split_rows
from rlhf.training.stages.chat_settings import Chats
from rlhf.training.stages.demonstrations import Demonstration, render
from rlhf.training.stages.supervised import Supervised
from rlhf.training.stages.supervised_training import by_demonstration, read_too, sft_samples


def data_stages(recipe: Recipe) -> Iterator[tuple[int, Chats]]:
    """Give the number of each stage that learns from data, and its keys."""
    for index, stage in enumerate(recipe.stages):
        if isinstance(stage, Supervised) and stage.data is not None:
            yield index, stage.data


def check_data(recipe: Recipe, say: Callable[[str], None] = lambda text: None) -> None:
    """Read the data of every stage once, so that errors appear before anything loads. Raises RecipeError."""
    for index, _ in data_stages(recipe):
        found = texts_of(recipe, index)
        said = ((text, one.number) for one in found if isinstance(one, Chat) for text in one.texts)
        caution_learnt(recipe, said, f"stages[{index}].data", say)


def texts_of(recipe: Recipe, index: int) -> Sequence[Chat | Demonstration]:
    """Chats, or attempts, that a stage learns from. Raises RecipeError."""
    stage: Any = recipe.stages[index]
    where = f"stages[{index}].data"
    if stage.data.path is not None:
        return list(read_chats(stage.data, where))
    return _attempts(recipe.at(stage), stage.data, stage.split, f"{where}.from_run")


async def rows_of(recipe: Recipe, index: int, found: Sequence[Any], renderer: Renderer, max_context: int) -> DataRows:
    """Token rows of a stage. Raises RecipeError where one is longer than the policy's context."""
    stage: Any = recipe.stages[index]
    data, where, dropped = stage.data, f"stages[{index}].data", 0
    prompts: Sequence[Hashable]
    if data.path is not None:
        agents = (part for _, part in with_parts("agent", recipe.agent) if isinstance(part, ToolAgent))
        style: Style = next((agent.tool_format for agent in agents), "hermes")
        samples, dropped = chat_samples(found, renderer, max_context, data, where, style)
        prompts = [prompt_of(sample) for sample in samples]
        rows = [[read_too(s, stage.observation_weight) if stage.observation_weight else s] for s in samples]
    else:
        failed = [d for d in found if data.unsolved_system is not None and not d.trajectory.solved]
        rendered = await render(
            [d for d in found if data.unsolved_system is None or d.trajectory.solved], _AsSaid(recipe.agent), renderer
        )
        if failed:
            agent: Any = recipe.agent  # one of kind chat
            rendered += await render(failed, _AsSaid(replace(agent, system=data.unsolved_system)), renderer)
        played = [trajectory for trajectory in rendered if trajectory.turns]
        rows = by_demonstration(sft_samples(played, stage.observation_weight))
        kept = [group for group in rows if all(len(sample) <= max_context for sample in group)]
        dropped, rows = len(rows) - len(kept), kept
        if dropped and data.too_long == "refuse":
            raise RecipeError(
                "attempts are longer than the policy's context",
                where=f"{where}.from_run",
                got=f"{dropped:,} of {dropped + len(kept):,} attempts",
                expected=f"at most {max_context:,} tokens",
                hint=f"leave them out with {where}.too_long=drop, or take a policy with a longer context",
            )
        owners = (played[group[0].sequence] for group in rows)
        prompts = [origin_of(trajectory.task_id, trajectory.n_given) for trajectory in owners]
    return split_rows(rows, data, f"{recipe.seed}/{index}/held_out", where, dropped, prompts)


def digests(recipe: Recipe) -> dict[str, str]:
    """SHA-256 of each file that stages learn from, by its key, for the record of a run."""
    return {
        f"stages[{index}].data": f"{data.path.name} sha256:{digest_of(data.path)[:16]}"
        for index, data in data_stages(recipe)
        if data.path is not None and data.path.exists()
    }


@dataclass(frozen=True)
class _AsSaid:
    """The recipe's agent, which says an attempt's own words where it is shown them."""

    agent: Any

    def act(self, *args: Any) -> Any:
        return self.agent.act(*args)

    def write(self, shown: DemonstrationInputs) -> str:
        words = shown.action
        return words.said if isinstance(words, _Words) and self._reads(words) else str(self.agent.write(shown))

    def _reads(self, words: _Words) -> bool:
        """True if the agent reads the action in the reply, or the agent of that time could not."""
        read = getattr(self.agent, "read", None)
        if read is None or not words.is_read:
            return bool(words.said)
        found = read(words.said)
        return bool(words.said) and found.error is None and found.text == words


class _Words(str):
    """An action, the whole reply that it was read from, and whether it could be read."""

    said: str = ""
    is_read: bool = True


def _worded(trajectory: Trajectory) -> Trajectory:
    """The attempt with the texts of its replies, and without token ids of another tokenizer."""
    turns = []
    for turn in trajectory.turns:
        text = _Words(turn.action.text)
        text.said, text.is_read = turn.action.reply_text, turn.action.error is None
        turns.append(replace(turn, action=Action(text, parts=turn.action.parts, error=turn.action.error)))
    return replace(trajectory, turns=tuple(turns))


def _attempts(recipe: Recipe, data: Chats, split: str, where: str) -> list[Demonstration]:
    """Attempts of another run or evaluation that are worth imitating, at tasks of a split."""
    assert data.from_run is not None
    folder = data.from_run / "trajectories"
    if not list_steps(folder):
        raise RecipeError(
            "this folder holds no attempts",
            where=where,
            got=str(data.from_run),
            expected="the folder of a run, or of an evaluation: rlhf evaluate ... --out FOLDER",
            hint=where_to_look(data.from_run),
        )
    if Capabilities(recipe.agent).write is None:
        got = type(recipe.agent).__name__
        raise RecipeError(
            "this agent cannot rewrite stored attempts", where="agent", got=got, expected="a method `write`"
        )
    for part_path, part in with_parts("agent", recipe.agent):
        if getattr(part, "show_admissible", False):
            raise RecipeError(
                "stored attempts do not say which actions were possible",
                where=f"{part_path}.show_admissible",
                got="true",
                expected="false in a recipe that imitates them",
                hint="set it to false, or imitate the oracle: n_demonstrations",
            )
        if roles := [role for role in Capabilities(part).roles if role]:
            raise RecipeError(
                "stored attempts say the words of actions alone, and this agent is asked for others",
                where=part_path,
                got=f"calls in the roles {', '.join(roles)}",
                expected="an agent with one call a turn",
                hint="imitate the oracle: n_demonstrations; or imitate with agent: {kind: chat}",
            )
    tasks = {task.id: task for task in tasks_of(recipe.environment, split)}
    kept: dict[str, list[tuple[float, Trajectory]]] = {}
    n, n_known = 0, 0
    for record in read_trajectories(folder):
        t, total = record.trajectory, record.score.total if record.score else 0.0
        n, n_known = n + 1, n_known + (record.task_id in tasks)
        if record.task_id in tasks and t.turns and _is_worth(data, t, total):
            kept.setdefault(record.task_id, []).append((total, t))
    if not kept:
        raise RecipeError(
            "no attempt in this folder qualifies for imitation",
            where=where,
            got=f"{n} attempts, {n_known} of them at tasks of the split {split!r} of this environment",
            expected="one that is solved"
            if data.min_score is None
            else f"one with a score of at least {data.min_score:g}",
            hint="use the environment and split of that run, or lower `min_score`",
        )
    return [d for name, found in kept.items() for d in _best(tasks[name], found, data.max_per_task)]


def _is_worth(data: Chats, t: Trajectory, total: float) -> bool:
    """True if an attempt is imitated: by score, by success, or always."""
    return data.unsolved_system is not None or (t.solved if data.min_score is None else total >= data.min_score)


def _best(task: Task, found: Sequence[tuple[float, Trajectory]], most: int | None) -> Iterator[Demonstration]:
    """The best different attempts at a task."""
    different: dict[tuple[str, ...], Trajectory] = {}
    for _, t in sorted(found, key=lambda one: -one[0]):
        different.setdefault(tuple(turn.action.reply_text or turn.action.text for turn in t.turns), t)
    for t in list(different.values())[:most]:
        seats = tuple(turn.action.notes.get(SEAT, "") for turn in t.turns)
        yield Demonstration(task, _worded(t), ((),) * len(t.turns), seats=seats if any(seats) else ())
