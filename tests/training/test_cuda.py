"""CUDA kernels against plain torch in float32. `make gpu-test` runs these."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.inference.embedded.attention import RowPlan, shared_prefixes
from rlhf.inference.embedded.varlen import VarlenPlan
from rlhf.spans import span
from rlhf.training.backends import fused_head
from rlhf.training.backends.token_stats import _Read
from rlhf.training.contrib.profiling import Profiler
from tests.rollout.test_varlen import rows_of_groups

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("shares", [False, True])
def test_varlen_attention_equals_padded_attention(shares: bool) -> None:
    """Queries shorter than their keys see all of what lies before them: the kernel's mask is aligned to the end."""
    ids, lengths = rows_of_groups()
    source = shared_prefixes(ids, lengths) if shares else None
    plans = (VarlenPlan(lengths, "cuda", source), RowPlan(lengths, "cuda", source))
    torch.manual_seed(0)
    n = plans[0].n_computed
    inputs = [torch.randn(n, heads, 128, device="cuda").bfloat16() for heads in (16, 8, 8)]
    weights, found = torch.randn(n, 16, 128, device="cuda"), []
    for plan, dtype in zip(plans, (torch.bfloat16, torch.float32), strict=True):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        out = plan.attend(0, *leaves, 128**-0.5, 0.0)
        (out.float() * weights).sum().backward()
        found.append([out.detach(), *(x.grad for x in leaves)])
    assert all(relative(ours, theirs) < 1e-2 for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("share", [0.05, 0.0], ids=["kept", "pieces"])
def test_the_fused_head_equals_plain_torch(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head, "KEPT_SHARE", share)
    monkeypatch.setattr(fused_head, "PIECE_BYTES", 2**26)
    torch.manual_seed(0)
    hidden, weight = torch.randn(600, 256, device="cuda"), 0.05 * torch.randn(151_936, 256, device="cuda")
    targets, grads = torch.randint(0, 151_936, (600,), device="cuda"), torch.randn(600, 4, device="cuda")
    found = []
    for node, dtype in ((fused_head.FusedHead, torch.bfloat16), (_Read, torch.float32)):
        h, w = (x.bfloat16().to(dtype).requires_grad_() for x in (hidden, weight))
        columns = node.apply(h, w, targets, 1.0, ("entropy", "mean_logprobs"))
        (columns * grads)[:, :3].sum().backward()
        found.append((columns.detach(), h.grad, w.grad))
    assert all(relative(ours, theirs) < 1e-2 for ours, theirs in zip(*found, strict=True))


def test_transfers_to_the_gpu_keep_their_values() -> None:
    from rlhf.inference.embedded.row_layout import on_device

    array = np.arange(1000)
    assert torch.equal(on_device(array, "cuda").cpu(), torch.arange(1000))


def test_a_profile_has_the_kernels_and_waits_for_them(tmp_path: Path) -> None:
    x = torch.randn(4096, 4096, device="cuda")
    profiler = Profiler(tmp_path, 0, 0, 1, False)
    with profiler.at(0, "s", 0, lambda text: None):
        with span("forward"):
            for _ in range(20):
                x @ x
        with span("backward"):
            pass
    [found] = profiler.steps
    assert found.seconds["forward"] > 20 * found.seconds["backward"], "kernels count where they were launched"
    with gzip.open(tmp_path / found.trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    assert sum(e.get("cat") == "kernel" for e in events) >= 20
