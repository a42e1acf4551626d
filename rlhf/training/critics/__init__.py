"""Critics: settings, value models and their updates."""
