"""Credit assignment: from a scored group to one number per sampled token."""
