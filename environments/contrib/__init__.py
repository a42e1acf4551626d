"""Further games and tasks of our own."""
