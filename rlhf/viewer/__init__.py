"""Views of runs and trajectories."""
