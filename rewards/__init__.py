"""Rewards: verifiers, judges, reward models and shaping. Importing this loads no torch."""
