"""Choice of the next tasks."""
