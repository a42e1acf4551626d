"""Inference: engines that sample for a policy. Importing this loads no torch."""
