"""TextWorldExpress: eight quick text games."""
