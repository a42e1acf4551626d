"""Rare memories of an episode."""
