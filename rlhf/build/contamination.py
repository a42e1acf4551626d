"""Contamination guard: training, validation and test tasks must not overlap.

Tasks are the same where their ids are, or where everything else in them is: a split that lists the tasks of another one
under other names is found too.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf.data import Task
from rlhf.errors import RecipeError, RlhfError
from rlhf.recipe import Recipe, load
from rlhf.recipe.evaluation_request import EvaluationRequest, is_model
from rlhf.recipe.model import values_of
from rlhf.recipe.splits import refuse_judging
from rlhf.rollout.tasks import tasks_of
from rlhf.training.stages.chat_files import read_chats
from rlhf.training.stages.pair_files import read_rated
from rlhf.training.stages.pair_settings import PairStage
from rlhf.training.stages.policy_gradient import PolicyGradient


def in_both(judged: Sequence[Task], trained: Sequence[Task], *, by_id: bool = True) -> list[str]:
    """Ids of evaluation tasks that are also trained on, compared by content, and by id in one environment.

    Questions are the same where their contents are. Other tasks, which an environment draws by their ids, are told
    apart by content unless the same is in another task of the list, or there is nothing but an id.
    """
    own, judged_ids = _telling(judged), {task.id for task in judged if by_id}
    asked, ids, inside = set(own.values()), set[str](), Counter[str]()
    for task in trained:  # of which there may be more than fit into memory
        ids |= {task.id} & judged_ids
        inside.update({_content(task)} & asked)
    return [
        task.id
        for task in judged
        if task.id in ids or inside[own.get(task.id, "")] == 1 or (_is_question(task) and inside[own[task.id]])
    ]


def _is_question(task: Task) -> bool:
    """True if what is in a task is the whole of it: a prompt, rather than an id that a world is drawn by."""
    return isinstance(task.info.get("prompt"), str)


def _telling(tasks: Sequence[Task]) -> dict[str, str]:
    """Task -> everything in it but its id, where that tells it from the others or is the whole of it."""
    inside = {task.id: _content(task) for task in tasks}
    counts, asked = Counter(inside.values()), {task.id for task in tasks if _is_question(task)}
    return {name: text for name, text in inside.items() if name in asked or (counts[text] == 1 and text != _NOTHING)}


def _content(task: Task) -> str:
    """Content of a task without its id; for a question its text, without spacing and other columns."""
    if _is_question(task):
        return json.dumps([_plain(text) for text in (*(m.content for m in task.messages), task.info["prompt"])])
    values = asdict(task)
    values["info"] = {key: value for key, value in values["info"].items() if key != "row"}  # its place in a file
    return json.dumps({key: values[key] for key in values if key not in ("id", "origin")}, sort_keys=True, default=str)


#: Lines of evaluation tasks that a caution names.
_NAMED = 3
#: Words of a question that is found within a longer text too; a shorter one may be part of another question.
_LEAST_WORDS = 8
#: Likewise characters, of scripts without spaces between words.
_LEAST_CHARS = 16
#: Those scripts: Thai, Lao, Burmese, Khmer, Chinese, Japanese.
_UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3041-\u30ff\u3400-\u9fff\uf900-\ufaff\uff66-\uff9d"
    r"\U00020000-\U0003ffff"
)
#: Numbers, words, or characters of such scripts, and single marks, in which questions are looked for.
_WORDS = re.compile(rf"\d+(?:[.,]\d+)+|[{_UNSPACED}]|[^\W_{_UNSPACED}]+|\S")
#: Marks of sentences, quotes and emphasis at the ends of a question, which do not matter; `?**` is three.
_EDGE = frozenset(".?!:;,\"'`*_“”‘’。？！：；，、「」『』")
_MAX_EDGE = 3
#: How a formula goes on, its words apart: by an operator and its operand; `**` and `<` may be markup before a word.
_GOES_ON = re.compile(r"[-+−*/^=%×·÷] (?:[^\W_]|\()|(?:\* \*|[<>](?: =)?) \d")
_NOTHING = _content(Task("a task with an id and nothing else"))


def refuse_overlap(recipe: Recipe) -> None:
    """Raise RecipeError where training, validation and test tasks overlap.

    With `evaluation.allow_overlap` nothing is looked for.
    """
    own, environment = recipe.evaluation, recipe.environment
    if own.allow_overlap:
        return
    refuse_judging(recipe)
    lists = {"evaluation.split": (own.split, tasks_of(environment, own.split, own.n_tasks))}
    if any(isinstance(stage, PolicyGradient) and stage.evaluate_every for stage in recipe.stages):
        watched = tasks_of(environment, own.validation_split, own.validation_n_tasks)
        _refuse(lists["evaluation.split"], "evaluation.validation_split", own.validation_split, watched, "validated on")
        lists["evaluation.validation_split"] = (own.validation_split, watched)
    for i, stage in enumerate(recipe.stages):
        if stage.reads_file:
            continue
        trained = tasks_of(environment if stage.environment is None else stage.environment, stage.split)
        for judged in lists.values():
            by_id = stage.environment in (None, environment)
            _refuse(judged, f"stages[{i}].split", stage.split, trained, "trained on", by_id=by_id)


def caution_learnt(recipe: Recipe, said: Iterable[tuple[str, int]], where: str, say: Callable[[str], None]) -> None:
    """Caution about questions of evaluation tasks in a file that is learnt from.

    Args:
        recipe: with the evaluation.
        said: texts of the file, each with its line.
        where: YAML path of the key that names the file.
        say: prints it.
    """
    own = recipe.evaluation
    if lines := _lines_asking(tasks_of(recipe.environment, own.split, own.n_tasks), said):
        told = f"{len(lines)} tasks that the policy is judged by are in {where}, such as {_named_lines(lines)}"
        say(f"caution: {told}: take these rows out, or success is measured on what was learnt by heart")


def _lines_asking(tasks: Sequence[Task], said: Iterable[tuple[str, int]]) -> list[int]:
    """Lines of a file in which questions of `tasks` are, alone or within a longer text, one for each question.

    Within a text, what is around a question does not matter, as in `<q>...</q>` and `**...**`, nor does the punctuation
    at its ends. Other marks are part of it, such as the last row of a maze.
    """
    asked = {_plain(prompt) for task in tasks if isinstance(prompt := task.info.get("prompt"), str)}
    longer: dict[tuple[str, ...], list[tuple[list[str], str]]] = {}  # by its first words
    for question in asked:
        words = _WORDS.findall(question)
        n_chars = len(re.findall(f"[{_UNSPACED}]", question))
        is_long = len(question.split()) >= _LEAST_WORDS or n_chars >= _LEAST_CHARS
        if is_long and sum(word[0].isalnum() for word in words) >= _LEAST_WORDS:
            words = _trimmed(words, question.split())
            longer.setdefault(tuple(words[:_LEAST_WORDS]), []).append((words, question))
    first = {begin[0] for begin in longer}
    found: dict[str, int] = {}
    for text, line in said if asked else ():
        words = _WORDS.findall(text) if longer else []
        at = (i for i, word in enumerate(words) if word in first)
        inside = (
            q for i in at for own, q in longer.get(tuple(words[i : i + _LEAST_WORDS]), ()) if _is_at(own, words, i)
        )
        found |= dict.fromkeys([*inside, *({_plain(text)} & asked)], line)
    return sorted(found.values())


def _trimmed(words: Sequence[str], chunks: Sequence[str]) -> list[str]:
    """Words of a question without punctuation at its ends, unless it stands alone there, as in a row of a board.

    Args:
        words: of the question, marks included.
        chunks: of the question, split at spaces.
    """
    kept = list(words)
    for end in (0, -1):
        if any(map(str.isalnum, chunks[end])):
            for _ in range(_MAX_EDGE):
                if kept[end] in _EDGE:
                    kept.pop(end)
    return kept


def _is_at(question: list[str], words: list[str], i: int) -> bool:
    """Match of a question with the words of a text from place `i` on; `1 + 2` does not match within `1 + 2 + 3`."""
    end = i + len(question)
    return words[i:end] == question and not _GOES_ON.match(" ".join(words[end : end + 3]))


def _named_lines(lines: Sequence[int]) -> str:
    return ", ".join(f"line {line}" for line in lines[:_NAMED])


def _plain(text: str) -> str:
    return " ".join(text.split())


def _refuse(
    judged: tuple[str, Sequence[Task]],
    where: str,
    split: str,
    tasks: Sequence[Task],
    how: str,
    *,
    by_id: bool = True,
) -> None:
    both = in_both(judged[1], tasks, by_id=by_id)
    if both:
        other = "another split" if split == judged[0] else "an environment whose splits share no task"
        raise RecipeError(
            f"evaluation tasks would be {how}",
            where=where,
            got=f"{len(both)} of {len(judged[1])} tasks of the split {judged[0]!r} are in {split!r}, such as {both[0]}",
            expected=other,
            hint="give splits tasks of their own; if it is meant, set evaluation.allow_overlap: true",
        )


def refuse_trained(
    asked: EvaluationRequest,
    recipe: Recipe | None,
    checkpoint: Path | None,
    tasks: Mapping[str, Sequence[Task]],
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Raise RecipeError if the policy was trained on a task of the suite, unless this is allowed.

    Known of the checkpoints of runs, whose recipe says what their stages draw from, or which file they learn from; of
    other models, and of attempts of other runs, nothing is known.

    Args:
        asked: what is evaluated.
        recipe: of the policy, where it has one.
        checkpoint: of the policy, where it has one.
        tasks: part -> tasks of the suite.
        say: prints which file could not be read any more.
    """
    if recipe is None or checkpoint is None or asked.also_trained or (asked.suite and is_model(asked.target)):
        return
    judged = [task for listed in tasks.values() for task in listed]
    part_of = {task.id: name for name, listed in tasks.items() for task in listed}
    trained = _trained(asked, recipe)
    own, now = (values_of(one)["environment"] for one in (trained, recipe))
    is_same = bool(asked.suite) or own == now
    for i, stage in enumerate(trained.stages):
        if stage.reads_file:
            if lines := _lines_asking(judged, _said_in(stage, f"stages[{i}]", say)):
                got = f"{len(lines)} of {len(judged)} questions are in the file of stages[{i}], {_named_lines(lines)}"
                raise _of_training(asked, "--suite" if asked.suite else "evaluation.split", got)
            continue
        drawn = tasks_of(trained.at(stage).environment, stage.split)
        is_own = stage.environment in (None, trained.environment)
        both = in_both(judged, drawn, by_id=is_own and is_same)
        if is_own and not is_same and own["kind"] == now["kind"]:
            # With other settings the id of a task may be that of another one.
            both = list(dict.fromkeys([*both, *_equal(judged, drawn)]))
        if both:
            got = (
                f"{len(both)} of {len(judged)} tasks are in the split {stage.split!r} of stages[{i}], such as {both[0]}"
            )
            raise _of_training(asked, f"parts.{part_of[both[0]]}" if asked.suite else "evaluation.split", got)


def _said_in(stage: Any, path: str, say: Callable[[str], None]) -> list[tuple[str, int]]:
    """Texts of the file that a stage learns from, each with its line; none, with a caution, if the file is gone."""
    try:
        if isinstance(stage, PairStage) and stage.pairs.file is not None:
            rows = read_rated(stage.pairs.file.expanduser(), f"{path}.pairs.file")
            return [(message.content, row.line) for row in rows for message in row.prompt]
        chats = read_chats(stage.data, f"{path}.data")
        return [(text, chat.number) for chat in chats for text in chat.texts]
    except RlhfError as error:
        say(f"caution: not checked whether {path} learnt from tasks of this evaluation: {error.where}: {error.got}")
        return []


def _of_training(asked: EvaluationRequest, where: str, got: str) -> RecipeError:
    return RecipeError(
        "the policy was trained on tasks of this evaluation",
        where="--split" if asked.split else where,
        got=got,
        expected="tasks that training never drew from",
        hint="evaluate on another split; to evaluate on training tasks, add --allow-overlap",
    )


def _trained(asked: EvaluationRequest, recipe: Recipe) -> Recipe:
    """The recipe that a policy was trained with; the one with overrides, which are of the evaluation, if it is gone."""
    if not asked.overrides:
        return recipe
    try:
        return load(asked.target, is_trained=True)
    except RlhfError:  # parts that a program gave and gives no more, or a package that is not here
        return recipe


def _equal(judged: Sequence[Task], trained: Sequence[Task]) -> list[str]:
    """Ids of tasks that are in both lists with all that is in them."""
    inside = {task.id: _content(task) for task in judged}
    return [task.id for task in trained if task.id in inside and inside[task.id] == _content(task)]
