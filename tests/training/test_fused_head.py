"""Fused output layer and cross-entropy: the kernels, run by Triton's interpreter, against plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")

#: In a process of its own: Triton decides when it is imported whether it interprets.
PROGRAM = """
import torch
from rlhf.training.backends import fused_head, logit_kernels
from rlhf.training.backends import token_stats as reading

def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())

torch.manual_seed(0)
n, n_vocab = 5, 4099  # one more block than fits, and not a whole one
for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 6e-3)):
    for temperature in (1.0, 0.7):
        logits, targets = torch.randn(n, n_vocab).mul(3).to(dtype), torch.randint(0, n_vocab, (n,))
        z = (logits.double() / temperature).requires_grad_()
        log_p = z.log_softmax(-1)
        chosen, sums = log_p.gather(1, targets[:, None])[:, 0], z.logsumexp(-1)
        wanted = torch.stack([chosen, sums, -(log_p.exp() * log_p).sum(-1), log_p.mean(-1).detach()], 1)
        found = torch.zeros(n, 4)
        logit_kernels.statistics(logits, targets, temperature, sums=True, out=found)
        assert relative(found, wanted.detach()) < 1e-6, (dtype, temperature)
        grads = torch.randn(n, 4)
        (wanted * grads)[:, :3].sum().backward()
        by_logits = logit_kernels.gradients_(logits.clone(), targets, found, grads, temperature, entropy=True)
        assert relative(by_logits, z.grad / temperature) < bound, (dtype, temperature)

hidden, weight, targets = torch.randn(8, 16), torch.randn(77, 16), torch.randint(0, 77, (8,))
grads = torch.randn(8, 4)
for wanted in ((), ("entropy",), ("entropy", "mean_logprobs")):
    for share in (0.05, 0.0):  # all logits kept, and three tokens at a time
        fused_head.KEPT_SHARE, fused_head.PIECE_BYTES = share, 3 * 77 * 4
        found = []
        for node in (fused_head.FusedHead, reading._Read):
            h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            columns = node.apply(h, w, targets, 0.7, wanted)
            (columns * grads)[:, : 3 if wanted else 2].sum().backward()
            found.append((columns.detach()[:, : 2 + len(wanted)], h.grad, w.grad))
        for ours, theirs in zip(*found):
            assert torch.allclose(ours, theirs, atol=2e-5), (wanted, share)
        frozen = fused_head.FusedHead.apply(hidden.clone().requires_grad_(), weight, targets, 1.0, wanted)
        frozen[:, 0].sum().backward()
try:
    logit_kernels.statistics(torch.zeros(77, 4).T, targets[:4], 1.0, sums=False, out=torch.zeros(4, 4))
    raise SystemExit("gaps were taken")
except ValueError:
    pass
print("equal")
"""


def test_kernels_equal_plain_torch() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "equal\n", done.stderr[-2000:]
