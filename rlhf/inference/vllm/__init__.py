"""The vLLM engine: instances, servers and weight delivery."""
