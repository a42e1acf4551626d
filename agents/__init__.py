"""Agents: prompting, parsing and history. Importing this loads no torch."""

from rlhf.moved import install

install()
