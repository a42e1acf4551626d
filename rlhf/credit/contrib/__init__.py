"""Rare advantage estimators."""
