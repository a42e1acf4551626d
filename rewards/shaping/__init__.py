"""Outcome, length and penalty rewards."""
