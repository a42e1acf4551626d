"""What of the past an agent shows its policy."""
