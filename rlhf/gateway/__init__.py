"""The gateway: an OpenAI-compatible address for agents that live in programs of their own."""
