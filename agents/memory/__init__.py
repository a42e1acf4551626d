"""Memories of an agent: which part of an episode's past the policy is shown."""
