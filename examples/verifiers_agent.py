"""Plays a task of a verifiers taskset (0.4) by its own harness, and posts what it earned.

python examples/verifiers_agent.py --list TASKSET > tasks.jsonl      # tasks, for environment.environment
environment.command: [python, examples/verifiers_agent.py, TASKSET]  # one attempt, as the gateway starts it
"""

import asyncio
import json
import os
import sys
import urllib.request

import verifiers.v1 as vf


def main() -> None:
    """List the tasks, or play the one on standard input."""
    if sys.argv[1] == "--list":
        for task in vf.load_taskset(_config(sys.argv[2])):
            data = task.data
            print(json.dumps({"prompt": str(data.prompt), "idx": data.idx}))
        return
    asked = json.load(sys.stdin)["columns"]["idx"]
    episode = asyncio.run(play(sys.argv[1], asked))
    if not episode.ok:
        errors = [error.message for error in (*episode.errors, *(e for t in episode.traces for e in t.errors))]
        _post("fail", {"message": "; ".join(errors)})
    else:
        _post("reward", {"reward": sum(trace.reward for trace in episode.traces)})


async def play(name: str, idx: int) -> vf.Episode:
    """One episode of a task, with the policy behind the gateway as its model."""
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": name}, "agent": seat}))
    [task] = env.taskset.include(idx=[idx])
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        return await env.run_episode(task, vf.ModelContext(model="policy", client=client))


def _config(name: str) -> vf.TasksetConfig:
    return vf.taskset_config_type(name)(id=name)


def _post(route: str, body: dict) -> None:
    headers = {"Authorization": f"Bearer {os.environ['RLHF_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['RLHF_SESSION']}/{route}", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request).close()


if __name__ == "__main__":
    main()
