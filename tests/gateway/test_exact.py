"""Ids and log-probs of conversations over each wire: those sampled, recomputed from the stored rows, and forks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from rlhf.batching.samples import make_samples
from rlhf.data import Credit, Score, ScoredGroup, Trajectory
from rlhf.gateway.programs import KEY
from tests.gateway.talks import TALKS, World

pytest.importorskip("uvicorn")


def recomputed_gap(model: Any, trajectory: Trajectory) -> float:
    """Largest difference between the log-probs of the stored rows and those of a plain pass over them."""
    score = Score({}, (0.0,) * len(trajectory.turns), 0.0)
    group = ScoredGroup(trajectory.task_id, (trajectory,), (score,))
    credit = Credit((tuple((0.0,) * g.n_tokens for g in trajectory.generations),))
    worst = 0.0
    for row in make_samples([group], [credit])[0]:
        ids = torch.from_numpy(row.token_ids.copy()).long()[None]
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.from_numpy(row.mask[1:].copy())
        gaps = (logprobs - torch.from_numpy(row.sampler_logprobs[1:].copy()))[mask].abs()
        worst = max(worst, float(gaps.max()) if len(gaps) else 0.0)
    return worst


def n_rows(trajectory: Trajectory) -> int:
    """Rows: a generation goes on with one that was sampled before and that nothing else goes on with.

    Of two answers to one prompt that happen to be the same, going on with one is going on with both.
    """
    leaves: list[Any] = []
    n = 0
    for g in trajectory.generations:
        before = max((leaf for leaf in leaves if g.prompt.extends(leaf)), key=lambda leaf: leaf.length, default=None)
        n += before is None
        leaves = [leaf for leaf in leaves if before is None or leaf.full_ids != before.full_ids]
        leaves.append(g)
    return n


def check_exact(
    wire: str, n: int, monkeypatch: pytest.MonkeyPatch, world: World | None = None, gap: float = 1e-4
) -> tuple[int, int, int]:
    """Hold `n` conversations and return the numbers of generations, forks and results of tools."""
    monkeypatch.setenv(KEY, "known")
    numbers = itertools.count()
    world = world or World()
    n_calls = []

    def work(mine: dict[str, Any]) -> None:
        talk = TALKS[wire](mine, next(numbers))
        talk.run()
        n_calls.append(talk.n_results)

    played = world.play(work, n)
    assert len(played) == n
    n_generations = n_forks = 0
    for trajectory in played:
        assert trajectory.solved, trajectory.detail
        noted = [
            note for turn in trajectory.turns for name, note in turn.action.notes.items() if name.startswith("fork")
        ]
        assert len(noted) == trajectory.turns[-1].reward, noted
        n_cut = sum(note.startswith("cut ") for note in noted)  # its text may happen to be the sampled tokens
        assert 1 + len(noted) - n_cut <= n_rows(trajectory) <= 1 + len(noted)
        assert recomputed_gap(world.model, trajectory) < gap
        n_generations += len(trajectory.generations)
        n_forks += len(noted)
    return n_generations, n_forks, sum(n_calls)


@pytest.mark.parametrize("wire", TALKS)
def test_conversations_keep_every_sampled_token(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n_generations, n_forks, _ = check_exact(wire, 8, monkeypatch)
    assert n_generations - 8 - n_forks > 10 and n_forks > 3


@pytest.mark.extended
@pytest.mark.parametrize("wire", TALKS)
def test_two_hundred_conversations_keep_every_sampled_token(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n_generations, n_forks, n_results = check_exact(wire, 200, monkeypatch)
    print(wire, n_generations, "generations", n_forks, "forks", n_results, "results of tools")
    assert n_generations - 200 - n_forks > 300 and n_forks > 100
