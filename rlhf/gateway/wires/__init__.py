"""The wires: how requests and replies are written in the forms of OpenAI and Anthropic."""
