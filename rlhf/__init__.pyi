from rlhf.api.compare import Comparison as Comparison
from rlhf.api.compare import Comparisons as Comparisons
from rlhf.api.compare import compare as compare
from rlhf.api.evaluate import Evaluation as Evaluation
from rlhf.api.evaluate import evaluate as evaluate
from rlhf.api.train import Handle as Handle
from rlhf.api.train import TrainResult as TrainResult
from rlhf.api.train import load as load
from rlhf.api.train import start as start
from rlhf.api.train import train as train
from rlhf.commands.output import Stopped as Stopped
from rlhf.errors import RlhfError as RlhfError
from rlhf.recipe import Recipe as Recipe
from rlhf.training.hooks.callbacks import StepInfo as StepInfo

__version__: str
