"""Rarely used parts of rollout."""
