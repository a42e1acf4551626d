"""Rare policy losses."""
