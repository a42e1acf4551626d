"""Environments in worker processes."""
