"""Batching: from credit to flat rows, and from rows to packed tensors."""
