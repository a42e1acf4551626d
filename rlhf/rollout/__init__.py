"""Rollouts: episodes, groups, branching and scoring."""
