"""Training, evaluation and comparison from Python, by the same recipes and with the same messages as the commands."""

from rlhf.api.compare import Comparison, Comparisons, compare
from rlhf.api.evaluate import Evaluation, evaluate
from rlhf.api.train import Handle, TrainResult, load, start, train

__all__ = [
    "Comparison",
    "Comparisons",
    "Evaluation",
    "Handle",
    "TrainResult",
    "compare",
    "evaluate",
    "load",
    "start",
    "train",
]
