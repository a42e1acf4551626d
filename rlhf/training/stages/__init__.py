"""Stages of a recipe: settings and training of each kind."""
