from rlhf.api import Comparison as Comparison
from rlhf.api import Comparisons as Comparisons
from rlhf.api import Evaluation as Evaluation
from rlhf.api import Handle as Handle
from rlhf.api import TrainResult as TrainResult
from rlhf.api import compare as compare
from rlhf.api import evaluate as evaluate
from rlhf.api import load as load
from rlhf.api import start as start
from rlhf.api import train as train
from rlhf.commands.output import Stopped as Stopped
from rlhf.errors import RlhfError as RlhfError
from rlhf.recipe import Recipe as Recipe
from rlhf.training.hooks.callbacks import StepInfo as StepInfo

__version__: str
