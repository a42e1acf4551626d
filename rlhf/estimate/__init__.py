"""Estimates: memory, parameters and tokens of a recipe before it runs."""
