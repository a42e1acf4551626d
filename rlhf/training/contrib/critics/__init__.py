"""Critics beside the value model: two-level values, privileged critics, contributions of steps."""
