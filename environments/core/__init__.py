"""Foundations that environments share."""
