"""Rare stores."""
