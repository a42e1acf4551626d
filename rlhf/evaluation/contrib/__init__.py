"""Rarely used parts of evaluation."""
