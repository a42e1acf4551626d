"""Samplers of start states: tasks that begin in the middle of an episode."""
