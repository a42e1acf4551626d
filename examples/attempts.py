"""Attempts that a gateway has for an agent, for programs of any interpreter: nothing but the standard library.

A program that `environment: {kind: external, command: ..., n_programs: 4}` starts is told of the gateway by
RLHF_GATEWAY and RLHF_GATEWAY_KEY. One that comes by itself sets the same two variables.
"""

import json
import os
import urllib.error
import urllib.request


class Attempt:
    """One attempt: `base_url` and `key` for the client of the model, `task` for the agent."""

    def __init__(self, given):
        self.url, self.base_url, self.key, self.task = (given[name] for name in ("url", "base_url", "key", "task"))

    def step(self, action):
        """Do an action in the world of the task: {"reply": ..., "done": ..., "success": ...}."""
        return _post(f"{self.url}/step", self.key, {"action": action})

    def finish(self, **reward):
        """End the attempt; `reward=1.0` says what it earned."""
        return _post(f"{self.url}/finish", self.key, reward)

    def fail(self, error):
        """End an attempt that says nothing of the policy."""
        return _post(f"{self.url}/fail", self.key, {"message": f"{type(error).__name__}: {error}"})


def attempts():
    """Yield one attempt after the other, until the gateway is gone."""
    while True:
        try:
            yield Attempt(_post(os.environ["RLHF_GATEWAY"] + "/sessions", os.environ["RLHF_GATEWAY_KEY"], {}))
        except urllib.error.HTTPError as error:
            if error.code != 429:  # 429: nothing waits for an agent now
                return
        except OSError:
            return


def _post(url, key, body):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)
