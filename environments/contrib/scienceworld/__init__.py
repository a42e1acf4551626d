"""ScienceWorld: science experiments in text."""
