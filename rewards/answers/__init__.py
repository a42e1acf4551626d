"""Verifiers of answers: exact, numeric, mathematical, structured."""
