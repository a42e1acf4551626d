"""Hooks of the policy-gradient loop."""
