"""Rare agents."""
