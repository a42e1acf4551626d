"""Rewards that run what the policy wrote."""
