"""Python API: train, evaluate and compare with the recipes and messages of the command line."""
