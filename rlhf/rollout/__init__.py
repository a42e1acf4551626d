"""Rollout: engines that sample tokens, and episodes that turn tokens into trajectories."""
