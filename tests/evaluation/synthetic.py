"""A made-up run folder of realistic shape: a policy that learns to fetch a coin, with nothing trained."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rlhf.data import (
    Action,
    Credit,
    Failure,
    Finish,
    Generation,
    Outcome,
    Prompt,
    Score,
    ScoredGroup,
    TokenFigures,
    Trajectory,
    Turn,
    Verdict,
)
from rlhf.evaluation.statistics import share_interval, success_estimate
from rlhf.evaluation.store import TrajectoryWriter
from rlhf.rollout.runner import RolloutBatch
from rlhf.sinks import JsonlSink, Metrics

SYSTEM = "You play a text game. Find the coin and take it. Answer with one action."
ROOMS = ("kitchen", "corridor", "pantry", "backyard", "driveway", "living room")
ACTIONS = ("go north", "go east", "go south", "go west", "open door to north", "open door to east", "take coin", "look")
SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE of the game's own text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    texts = [SYSTEM, *ACTIONS, *(reply(room, random.Random(i)) for i, room in enumerate(ROOMS * 4))]
    core.train_from_iterator(texts, trainer)
    return core


def reply(room: str, rng: random.Random) -> str:
    """What the game says in a room."""
    door = rng.choice(("north", "east", "south", "west"))
    return (
        f"You are in the {room}. To the {door} you see the {rng.choice(ROOMS)}. There is a closed door to the {door}."
    )


def make_trajectory(
    tokenizer: Tokenizer,
    rng: random.Random,
    task_id: str,
    attempt: int,
    skill: float,
    version: int,
    max_turns: int = 12,
) -> Trajectory:
    """One episode: each turn is right with probability `skill`, and four right turns solve it."""
    of_task = random.Random(task_id)
    opening = reply(of_task.choice(ROOMS), of_task)
    ids = tokenizer.encode(f"<|system|>{SYSTEM}<|user|>{opening}<|assistant|>").ids
    turns: list[Turn] = []
    right = 0
    while right < 4 and len(turns) < max_turns:
        good = rng.random() < skill
        right += good
        garbled = not good and rng.random() < 0.25
        text = "take coin" if right == 4 else rng.choice(("goo north", "???") if garbled else ACTIONS[:6])
        sampled = tokenizer.encode(f"{text}<|end|>").ids
        logprobs = tuple(-abs(rng.gauss(0, 1.2 - skill)) for _ in sampled)
        generation = Generation(Prompt(tuple(ids), (0,)), tuple(sampled), logprobs, Finish.STOP, version)
        said = "That is not an action." if garbled else reply(rng.choice(ROOMS), rng)
        said = "You take the coin. You win!" if right == 4 else said
        reward = 1.0 if right == 4 else (-0.1 if garbled else 0.0)
        error = "not one of the admissible actions" if garbled else None
        turns.append(Turn(Action(text, (generation,), error), said, reward, f"state-{right}", not garbled))
        ids = [*generation.full_ids, *tokenizer.encode(f"<|user|>{said}<|assistant|>").ids]
    outcome = Outcome.SOLVED if right == 4 else Outcome.TURN_LIMIT
    return Trajectory(task_id, attempt, opening, tuple(turns), outcome, duration_s=rng.uniform(0.2, 2.0))


def make_group(
    tokenizer: Tokenizer, rng: random.Random, task_id: str, size: int, skill: float, version: int
) -> tuple[ScoredGroup, Credit]:
    """A scored group and leave-one-out credit, larger on the turns near the reward so that colours differ."""
    trajectories = tuple(make_trajectory(tokenizer, rng, task_id, i, skill, version) for i in range(size))
    scores = tuple(make_score(t) for t in trajectories)
    mean = sum(s.total for s in scores) / size
    tokens = tuple(
        tuple(
            tuple((s.total - mean) * 0.8 ** (len(t.turns) - 1 - k) for _ in g.token_ids)
            for k, turn in enumerate(t.turns)
            for g in turn.generations
        )
        for t, s in zip(trajectories, scores, strict=True)
    )
    failures = (Failure(size, Outcome.ENV_ERROR, "the game's process died", True),) if rng.random() < 0.02 else ()
    return ScoredGroup(task_id, trajectories, scores, failures), Credit(tokens)


def make_score(trajectory: Trajectory) -> Score:
    """The environment's reward, and a part for actions that could not be read."""
    turns = tuple(turn.reward for turn in trajectory.turns)
    parts = {
        "environment": Verdict(sum(turns), "sum of the environment's rewards", turns),
        "valid": Verdict(-float(sum(not t.valid for t in trajectory.turns)), "actions that could not be read"),
    }
    return Score(parts, turns, sum(turns))


def evaluation(groups: Sequence[ScoredGroup]) -> dict[str, Any]:
    """A result as an evaluation writes it."""
    trajectories = [t for g in groups for t in g.trajectories]
    n, solved = len(trajectories), sum(t.solved for t in trajectories)
    low, high = share_interval(solved, n)
    n_errors = sum(len(g.failures) for g in groups)
    return {"success": solved / n, "low": low, "high": high, "n": n, "n_errors": n_errors, "split": "test"}


def make_run(folder: Path, *, n_steps: int = 60, n_eval: int = 200, seed: int = 0) -> Path:
    """Write a whole run folder; returns it."""
    rng, tokenizer = random.Random(seed), make_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    writer = TrajectoryWriter(folder / "trajectories")
    metrics = Metrics([JsonlSink(folder / "metrics.jsonl")])
    for step in range(40):
        values = {"supervised/loss": 2.2 * math.exp(-step / 12) + 0.5 + rng.gauss(0, 0.03), "optimizer/lr": 1e-3}
        metrics.log(step + 1, "0-supervised", values)
    results = {}
    skills = [0.13 + 0.42 / (1 + math.exp(-(step - n_steps * 0.4) / (n_steps * 0.1))) for step in range(n_steps + 1)]
    for step in range(n_steps + 1):
        if step:
            groups = train_step(writer, tokenizer, rng, step, skills[step])
            metrics.log(step, "1-policy_gradient", step_metrics(groups, rng, step, n_steps))
        name = {0: "before", n_steps: "after"}.get(step)
        if name or step % 15 == 0:
            found = [make_group(tokenizer, rng, f"coin/test/{i}", 1, skills[step], step)[0] for i in range(n_eval)]
            result = evaluation(found)
            keys = {"success": "success", "low": "success_low", "high": "success_high", "n_errors": "n_errors"}
            metrics.log(step, "1-policy_gradient", {f"eval/{new}": result[old] for old, new in keys.items()})
            if name:
                writer.write_groups(name, step, "eval", found)
                results[name] = result
    metrics.close()
    write_facts(folder, results, tokenizer)
    return folder


def train_step(
    writer: TrajectoryWriter, tokenizer: Tokenizer, rng: random.Random, step: int, skill: float
) -> list[ScoredGroup]:
    """Eight groups of four, written with their credit."""
    pairs = [make_group(tokenizer, rng, f"coin/train/{step}-{i}", 4, skill, step) for i in range(8)]
    groups, credits = [g for g, _ in pairs], [c for _, c in pairs]
    figures = [make_figures(g) for g in groups] if step % 2 else None
    writer.write_groups("policy_gradient", step, "train", groups, credits, figures)
    return groups


def make_figures(group: ScoredGroup) -> TokenFigures:
    """Entropies and gaps as if every token were as likely as the policy is unsure."""
    likely = tuple(tuple(tuple(map(float, g.logps)) for g in t.generations) for t in group.trajectories)
    entropies, gaps = (
        tuple(tuple(tuple(by * x for x in row) for row in rows) for rows in likely) for by in (-1.0, 0.001)
    )
    return TokenFigures(entropies, gaps)


def step_metrics(groups: Sequence[ScoredGroup], rng: random.Random, step: int, n_steps: int) -> dict[str, float]:
    """The metrics of one step: counted where the groups give them, made up elsewhere."""
    trajectories = [t for g in groups for t in g.trajectories]
    turns = [turn for t in trajectories for turn in t.turns]
    totals = [[s.total for s in g.scores] for g in groups]
    n_failures = sum(len(g.failures) for g in groups)
    return {
        "rollout/success": sum(t.solved for t in trajectories) / len(trajectories),
        **RolloutBatch(tuple(groups), 1.0).success_interval(success_estimate),
        "rollout/return_mean": sum(map(sum, totals)) / len(trajectories),
        "rollout/n_episodes": len(trajectories),
        "rollout/n_turns_mean": len(turns) / len(trajectories),
        "rollout/n_tokens": sum(t.n_tokens for t in trajectories),
        "rollout/tokens_per_s": 1400 + rng.gauss(0, 60),
        "rollout/invalid_share": sum(not t.valid for t in turns) / len(turns),
        "rollout/n_truncated_generations": rng.choice((0, 0, 0, 2)),
        "rollout/n_infra_errors": n_failures,
        "rollout/infra_error_share": n_failures / (len(trajectories) + n_failures),
        "rollout/n_turn_limit": sum(t.outcome is Outcome.TURN_LIMIT for t in trajectories),
        "credit/n_groups": len(groups),
        "credit/n_zero_std_groups": sum(max(g) - min(g) < 1e-9 for g in totals),
        "loss/policy": rng.gauss(0, 0.02),
        "loss/entropy": 1.3 * math.exp(-step / n_steps) + rng.gauss(0, 0.03),
        "loss/approx_kl": abs(rng.gauss(0.004, 0.001)),
        "loss/sampler_logprob_diff_mean": abs(rng.gauss(2e-6, 4e-7)),
        "loss/sampler_logprob_diff_max": abs(rng.gauss(2e-5, 6e-6)),
        "optimizer/grad_norm": abs(rng.gauss(0.9, 0.2)),
        "optimizer/n_updates": step,
        "optimizer/n_skipped": 0,
        "time/rollout_s": 2.1 + rng.gauss(0, 0.1),
        "time/train_s": 1.4 + rng.gauss(0, 0.1),
        "time/step_s": 3.6,
        "memory/rss_gb": 1.4,
    }


def write_facts(folder: Path, results: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Recipe, versions, result and the final checkpoint's tokenizer."""
    (folder / "result.json").write_text(json.dumps(results))
    (folder / "recipe.yaml").write_text(
        "name: quickstart\nseed: 0\npolicy: {kind: from_scratch, hidden: 128}\n"
        "environment: {kind: textworld_express, game: coin}\nlimits: {max_tokens: 16, max_turns: 12}\n"
        "stages:\n- {kind: supervised, n_demonstrations: 512}\n- {kind: policy_gradient, steps: 60}\n"
    )
    versions = {"rlhf": "0.1.0", "python": "3.11.9", "device": "cpu", "threads": 2}
    packages = {"torch": "2.13.0", "textworld-express": "1.1.0"}
    (folder / "versions.json").write_text(json.dumps({**versions, "packages": packages}))
    policy = folder / "checkpoints" / "1-policy_gradient-60" / "policy"
    policy.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(policy / "tokenizer.json"))
