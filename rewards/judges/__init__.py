"""Rewards by language models, and by vote."""
