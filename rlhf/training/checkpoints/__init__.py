"""Checkpoints: what is stored, how it is copied and written."""
