"""Training, evaluation and comparison from Python, by the same recipes and with the same messages as the commands."""
