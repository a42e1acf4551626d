"""Asynchronous training: which groups may begin, which a step trains, how old they are, and where every token is."""
