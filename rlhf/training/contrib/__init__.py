"""Rare training methods."""
