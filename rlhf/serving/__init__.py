"""Serving: a policy behind vLLM's server, an environment behind OpenEnv's protocol."""
