"""Evaluation: intervals, the store of trajectories, figures and the report page. Import the module you need."""
