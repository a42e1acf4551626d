"""Training: loop, stages, hooks, critics, backends, policy and checkpoints."""
