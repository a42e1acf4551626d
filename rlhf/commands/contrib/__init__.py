"""Rare commands."""
