"""Shaping rewards: penalties, lengths, formats."""
