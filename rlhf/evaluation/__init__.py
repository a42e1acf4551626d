"""Evaluation: intervals, the store of trajectories, and figures. Import the module you need."""
