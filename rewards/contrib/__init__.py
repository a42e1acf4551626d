"""Rare rewards."""
