"""From a recipe to live objects: training, evaluation, preflight and resume."""
