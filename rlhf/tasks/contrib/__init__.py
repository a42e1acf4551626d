"""Rarely used parts of tasks."""
