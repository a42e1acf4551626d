"""Post-train LLM agents with reinforcement learning. Importing this package loads nothing heavy."""

__version__ = "0.1.0"

from rlhf.moved import install

install()
