"""Trainers: stages of a recipe, the optimiser, checkpoints, and the loop."""
