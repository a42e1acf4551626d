"""Variable-length attention over packed rows: layout and gradients, with a reference in the kernel's place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rlhf.device import Device
from rlhf.inference.embedded import varlen
from rlhf.inference.embedded.attention import RowPlan, shared_prefixes
from rlhf.inference.embedded.varlen import VarlenPlan, lay_out, takes_varlen
from tests.rollout.test_attention import tiny_model

HEADS, GROUPS, WIDTH = 4, 2, 8


def reference(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """Attention of each row by itself, queries aligned to the end of the keys, as the kernel's causal mask has it."""
    assert window_size == (-1, 0) and enable_gqa
    outs = []
    for row in range(len(cu_q) - 1):
        q, k, v = (x[cu[row] : cu[row + 1]].transpose(0, 1) for x, cu in ((query, cu_q), (key, cu_k), (value, cu_k)))
        n_q, n_k = q.shape[1], k.shape[1]
        assert n_q <= max_q and n_k <= max_k
        seen = torch.arange(n_k) <= torch.arange(n_k - n_q, n_k)[:, None]
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True))
    return torch.cat(outs, 1).transpose(0, 1)


def rows_of_groups() -> tuple[np.ndarray, np.ndarray]:
    """Three groups that begin alike, a row that is the beginning of another, and one that is there twice."""
    rng = np.random.default_rng(0)
    rows = []
    for group in range(3):
        prompt = rng.integers(0, 9, 20 + 5 * group)
        rows += [np.concatenate([prompt, rng.integers(0, 9, int(n))]) for n in rng.integers(1, 30, 4)]
    rows += [rows[0][:19], rows[5].copy(), rng.integers(0, 9, 1)]
    return np.concatenate(rows), np.array([len(row) for row in rows])


@pytest.mark.parametrize("shares", [False, True])
def test_equals_padded_attention_with_gradients(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", reference)
    ids, lengths = rows_of_groups()
    source = shared_prefixes(ids, lengths) if shares else None
    plans = (VarlenPlan(lengths, source=source), RowPlan(lengths, source=source))
    assert plans[0].n_computed == plans[1].n_computed
    assert (plans[0].n_computed < len(ids)) == shares
    for name in ("kept", "token_of", "position_ids"):
        assert torch.equal(getattr(plans[0], name), getattr(plans[1], name))
    n = plans[0].n_computed
    torch.manual_seed(0)
    inputs = [torch.randn(n, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    weights = torch.randn(n, HEADS, WIDTH)
    found = []
    for plan in plans:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = plan.attend(0, *leaves, 0.3, 0.0)
        (out * weights).sum().backward()
        assert plan.is_used
        found.append([out.detach(), *(x.grad for x in leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_copies_of_a_token_add_up_in_float32() -> None:
    """Tokens 0 1 2 0 1 3 of 4: the gradient of 0 is that of places 0 and 3; 256 + 1 + 1 is 258, not 256 in bfloat16."""
    plan = VarlenPlan([3, 3, 3], source=np.array([0, 1, 2, 0, 1, 5, 0, 1, 8]))
    assert plan.n_computed == 5
    x = torch.zeros(5, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    laid = lay_out(x, plan._laid, plan._first, plan._again, plan._copies)
    laid.backward(torch.tensor([256, 1, 1, 1, 1, 1, 1, 1, 1], dtype=torch.bfloat16).view(9, 1, 1))
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [258, 3, 1, 1, 1]


def test_laying_out_can_be_traced() -> None:
    plan = VarlenPlan([2, 3], source=np.array([0, 1, 0, 1, 4]))
    x = torch.randn(3, 1, 2, requires_grad=True)
    torch.library.opcheck(lay_out, (x, plan._laid, plan._first, plan._again, plan._copies))


def test_rows_must_have_tokens() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        VarlenPlan([3, 0])


def test_only_what_the_kernel_can_do_goes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "present", lambda: Device("NVIDIA A100", 80 * 10**9, (8, 0)))
    model = tiny_model()
    assert not takes_varlen(model, torch.device("cpu"))
    gpu = torch.device("cuda")
    assert not takes_varlen(model, gpu), "float32"
    first = next(model.parameters())
    first.computed_in = torch.bfloat16  # type: ignore[attr-defined]
    assert takes_varlen(model, gpu), "shards in float32 that FSDP gathers in 16 bits"
    del first.computed_in
    model.to(torch.bfloat16)
    assert takes_varlen(model, gpu)
    attention = model.model.layers[1].self_attn
    attention.attention_dropout = model.config.attention_dropout = 0.1
    model.eval()
    assert takes_varlen(model, gpu)
    model.train()
    assert not takes_varlen(model, gpu), "dropout"
    attention.attention_dropout, model.config.head_dim = 0.0, 12
    assert not takes_varlen(model, gpu), "width"
    model.config.head_dim = 32
    assert takes_varlen(model, gpu), "dropout that the configuration names was disabled when the model was loaded"
    monkeypatch.setattr(varlen, "present", lambda: Device("Tesla T4", 16 * 10**9, (7, 5)))
    assert not takes_varlen(model, gpu), "before Ampere"
