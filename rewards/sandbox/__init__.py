"""Running what a model wrote: limits, levels of isolation, a judge that stays outside. Importing this loads nothing."""
