"""Environments and tools that other processes serve."""
