"""Reference tasks: tools, reasoning problems, and files of questions."""
