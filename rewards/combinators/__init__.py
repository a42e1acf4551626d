"""Rewards made of other rewards."""
