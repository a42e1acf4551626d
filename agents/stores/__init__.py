"""Memories that outlive an episode, in one SQLite file."""
