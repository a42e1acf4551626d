"""Environments made of other environments."""
