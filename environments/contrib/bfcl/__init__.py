"""BFCL: multi-turn function calls."""
