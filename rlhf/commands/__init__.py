"""The commands, one file per group. Importing these files loads neither torch nor a recipe."""
