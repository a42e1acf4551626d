"""Texts of a trajectory that rewards read: the last answer, and everything said."""

from __future__ import annotations

from rewards.answers.calls import ANSWERS, answer_in, calls_in, tool_call
from rewards.answers.extract import MAX_TEXT, after_thinking
from rlhf.data import Outcome, Task, Trajectory
from rlhf.errors import RewardError


def last_action(trajectory: Trajectory) -> str:
    """Text of the last action; empty where there is none, it was unreadable, or `ends_in_call`."""
    if not trajectory.turns or trajectory.turns[-1].action.error is not None or ends_in_call(trajectory):
        return ""
    return trajectory.turns[-1].action.text


def ends_in_call(trajectory: Trajectory) -> bool:
    """True if a limit cut the attempt after a call of a tool, so that it has no answer.

    A call is an action in the form that the agent `tools` gives all of them; `answer` and `submit` give an answer.
    """
    if trajectory.outcome not in (Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT) or not trajectory.turns:
        return False
    action = trajectory.turns[-1].action
    is_call = all(tool_call(step) is not None for step in action.steps)
    return is_call and not any(call.name.lower() in ANSWERS for call in calls_in(action))


def last_answer(trajectory: Trajectory) -> str:
    """Return what the last action answers (see `rewards.answers.calls`); empty where there is none."""
    return answer_in(trajectory.turns[-1].action) if last_action(trajectory) else ""


def last_reply(trajectory: Trajectory) -> str:
    """Last reply of the policy without its thoughts; the last action may be a line of it.

    Where the action gives an answer to a tool, it is that answer; empty where there is no action that could be read.
    """
    action, answer = last_action(trajectory), last_answer(trajectory)
    if not action or answer != action:
        return answer
    return after_thinking(trajectory.turns[-1].action.reply_text).strip() or action


def transcript(trajectory: Trajectory, *, replies: bool = False) -> str:
    """Transcript of all actions, with the environment's replies if asked for; the end of a long one."""
    said = [part for turn in trajectory.turns for part in (turn.action.text, *([turn.reply] if replies else []))]
    return "\n".join(said)[-MAX_TEXT:]


def everything_said(trajectory: Trajectory) -> str:
    """Replies of the policy with its thoughts; of a turn that has none recorded the action. The end of a long one."""
    return "\n".join(turn.action.reply_text or turn.action.text for turn in trajectory.turns)[-MAX_TEXT:]


def reference_of(task: Task, name: str, *, with_parts: bool = False) -> str:
    """Return the task's reference. Raises RewardError where it has none, or one with parts, unless told `with_parts`.

    A reference with parts is a mapping or a list of numbers in verl's data, written as JSON.
    """
    where = f"{name}, task {task.id}"
    if task.reference is None:
        raise RewardError(
            "the task has no reference to compare with",
            where=where,
            got="None",
            expected="Task.reference",
            hint="use a reward that needs none, or an environment whose tasks have references",
        )
    if task.info.get("structured") and not with_parts:
        raise RewardError(
            "a reference with parts is for functions of verl's or TRL's signature",
            where=where,
            got=task.reference[:80],
            expected="one text or number as the reference",
            hint="name a key in it: environment.reference=reward_model.ground_truth.KEY",
        )
    return task.reference
