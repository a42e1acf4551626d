"""Trainer backends: torch, DeepSpeed and FSDP2, optimizers and per-token statistics."""
