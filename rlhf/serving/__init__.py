"""Serving: a policy behind an OpenAI-compatible server or the gateway, an environment behind OpenEnv's protocol."""
