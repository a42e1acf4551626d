"""Policy losses: arrays in, a scalar and metrics out."""
