"""Post-train LLM agents with reinforcement learning. Importing this package loads nothing heavy."""

__version__ = "0.1.0"

#: Names that a program uses, by the module that has them; imported when they are asked for.
_LAZY = {
    **dict.fromkeys(("Comparison", "Comparisons", "compare"), "rlhf.api.compare"),
    **dict.fromkeys(("Evaluation", "evaluate"), "rlhf.api.evaluate"),
    **dict.fromkeys(("Handle", "TrainResult", "load", "start", "train"), "rlhf.api.train"),
    "Recipe": "rlhf.recipe",
    "RlhfError": "rlhf.errors",
    "StepInfo": "rlhf.training.hooks.callbacks",
    "Stopped": "rlhf.commands.output",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> object:
    """Import what a program uses."""
    if name not in _LAZY:
        raise AttributeError(f"module 'rlhf' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
