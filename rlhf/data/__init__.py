"""Core data types, frozen dataclasses: Task, Trajectory, Turn, Generation, ScoredGroup, Credit."""

from rlhf.data.generation import Finish, Generation, Prompt, SamplingParams
from rlhf.data.messages import Message, Role
from rlhf.data.scoring import Credit, Failure, Score, ScoredGroup, TokenFigures, Values, Verdict
from rlhf.data.task import Task
from rlhf.data.trajectory import Action, Outcome, Trajectory, Turn
from rlhf.data.weights import PolicyWeights, WeightsForm

__all__ = [
    "Action",
    "Credit",
    "Failure",
    "Finish",
    "Generation",
    "Message",
    "Outcome",
    "PolicyWeights",
    "Prompt",
    "Role",
    "SamplingParams",
    "Score",
    "ScoredGroup",
    "Task",
    "TokenFigures",
    "Trajectory",
    "Turn",
    "Values",
    "Verdict",
    "WeightsForm",
]
