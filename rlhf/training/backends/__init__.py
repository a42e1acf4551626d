"""Trainer backends: torch and DeepSpeed, optimizers and per-token statistics."""
