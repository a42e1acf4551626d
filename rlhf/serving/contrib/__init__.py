"""Rarely used parts of serving."""
