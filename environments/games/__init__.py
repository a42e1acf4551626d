"""Reference games, drawn by seed."""
