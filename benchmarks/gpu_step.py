"""Seconds of a whole GRPO step on a GPU, here and with TRL's GRPOTrainer and vLLM, on the same prompts and rewards.

    python benchmarks/gpu_step.py [--model 0.6b] [--steps 8] [--sides ours theirs] [--lora] [--out FOLDER]

A step has 32 questions, 8 attempts at each, and replies of about 500 tokens, cut there; rewards are made up from the
replies. One random model of Qwen3's shape in bfloat16, one GPU, which trainer and vLLM share in both:

- ours: float32 masters and moments, layers compiled, one update with 256 attempts;
- theirs: bfloat16 throughout, vLLM beside the trainer (`vllm_mode: colocate`), `--rows` attempts at a time, which are
  as many as fit, no recomputation of activations.

Each is a process of its own, one after the other. A step lasts from the rewards of one to those of the next, and so has
one update, one delivery of weights and one rollout; medians over the steps after the second. The first reward tells how
long the start took, with imports, vLLM's start and the first rollout.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import shapes

OURS = """\
import rlhf
from verifier import score

grpo = {
    "kind": "policy_gradient", "steps": $STEPS, "tasks_per_step": 32, "group_size": 8, "optimizer": {"lr": 1e-6},
    "max_tokens_per_microbatch": $BUDGET, "checkpoint_every": 0,
}
rlhf.train(
    policy={"kind": "pretrained", "path": "model", "dtype": "$DTYPE", "lora": $LORA}, rewards=score,
    environment={"kind": "dataset", "train": "train.jsonl", "test": "test.jsonl"},
    engine={"kind": "vllm", $ENGINE}, limits={"max_tokens": $TOKENS, "max_concurrent": 256, "max_context": 1024},
    evaluation={"before": False, "n_tasks": 4}, stages=[grpo], out="ours",
)
"""
THEIRS = """\
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from verifier import score

data = load_dataset("json", data_files="train.jsonl", split="train")
config = GRPOConfig(
    output_dir="theirs", max_steps=$STEPS, num_generations=8, per_device_train_batch_size=$ROWS,
    gradient_accumulation_steps=256 // $ROWS, max_completion_length=$TOKENS, learning_rate=1e-6,
    lr_scheduler_type="constant", gradient_checkpointing=False, save_strategy="no", report_to="none",
    model_init_kwargs={"dtype": "$DTYPE"}, $THEIR_ENGINE
)
trainer = GRPOTrainer(model="model", reward_funcs=score, args=config, train_dataset=data, peft_config=$LORA)
trainer.train()
"""
#: The reward of both, which also notes when it was called, and for how many.
VERIFIER = """\
import json, os, time


def score(completions, **kwargs):
    texts = [said[0]["content"] for said in completions]
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps({"at": time.time(), "n": len(texts), "n_characters": sum(map(len, texts))}) + "\\n")
    return [sum(map(ord, text)) % 97 / 97 for text in texts]
"""
SIDES = {"ours": OURS, "theirs": THEIRS}


def prepare(folder: Path, model: str, device: str) -> None:
    """Write model, questions and reward."""
    if (folder / "train.jsonl").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    shapes.save(model, folder / "model", device)
    rows = [{"prompt": [{"role": "user", "content": f"tell of {i} and {7 * i}" * 4}]} for i in range(2048)]
    (folder / "verifier.py").write_text(VERIFIER)
    for name, part in (("test", rows[:4]), ("train", rows[4:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def play(side: str, folder: Path, given: argparse.Namespace) -> dict[str, float]:
    """Run one side; seconds of its start and of each step."""
    is_gpu, script = given.device == "cuda", SIDES[side]
    own = f'"gpu_memory_utilization": {given.share}' if is_gpu else '"kv_cache_gb": 0.2'
    theirs = f'bf16=True, use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization={given.share}'
    adapters = {"ours": '{"rank": 16}', "theirs": 'LoraConfig(r=16, target_modules="all-linear")'}
    values = {
        "STEPS": given.steps, "BUDGET": given.budget, "TOKENS": given.tokens, "ROWS": given.rows,
        "DTYPE": "bfloat16" if is_gpu else "float32", "LORA": adapters[side] if given.lora else None,
        "ENGINE": own, "THEIR_ENGINE": theirs if is_gpu else "use_cpu=True, bf16=False",
    }  # fmt: skip
    for word, value in values.items():
        script = script.replace(f"${word}", str(value))
    (folder / f"{side}.py").write_text(script)
    shutil.rmtree(folder / side, ignore_errors=True)
    notes = folder / f"{side}.notes"
    notes.unlink(missing_ok=True)
    begin = time.time()
    with (folder / f"{side}.log").open("w") as log:
        ended = subprocess.run(
            [sys.executable, f"{side}.py"], cwd=folder, env=os.environ | {"NOTES": str(notes)}, stdout=log,
            stderr=subprocess.STDOUT, timeout=given.limit,
        )  # fmt: skip
    if ended.returncode:
        raise RuntimeError((folder / f"{side}.log").read_text()[-3000:])
    whole, n, ends, n_characters = 256, 0, [], 0
    for line in map(json.loads, notes.read_text().splitlines()):
        n, n_characters = n + line["n"], n_characters + line["n_characters"]
        if n >= whole:
            ends.append(line["at"])
            n -= whole
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    return {
        "start_s": ends[0] - begin, "first_s": seconds[0], "step_s": statistics.median(seconds[1:]),
        "least_s": min(seconds[1:]), "most_s": max(seconds[1:]), "characters": n_characters / len(ends) / whole,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=shapes.SHAPES, default="0.6b")
    parser.add_argument("--device", choices=shapes.DEVICES, default=shapes.here())
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--budget", type=int, default=32_768, help="tokens of our micro-batch")
    parser.add_argument("--rows", type=int, default=32, help="of TRL's batch on the GPU")
    parser.add_argument("--share", type=float, default=0.3, help="of the GPU's memory for vLLM")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--lora", action="store_true", help="adapters of rank 16 on all linear layers")
    parser.add_argument("--limit", type=float, default=600.0, help="most seconds of a side")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_step"))
    given = parser.parse_args()
    folder, found = given.out.resolve(), {}
    prepare(folder, given.model, given.device)
    for side in given.sides:
        try:
            one = found[side] = play(side, folder, given)
        except (RuntimeError, subprocess.TimeoutExpired, IndexError, statistics.StatisticsError) as error:
            print(f"{side}: {type(error).__name__} {error}", flush=True)
            continue
        print(f"{side:8s}" + ", ".join(f"{name} {value:.2f}" for name, value in one.items()), flush=True)
    if len(found) == len(SIDES):
        print(f"TRL's step takes {found['theirs']['step_s'] / found['ours']['step_s']:.2f} times ours")


if __name__ == "__main__":
    main()
