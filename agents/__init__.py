"""Agents: prompting, parsing and history. Importing this loads no torch."""
