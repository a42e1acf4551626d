"""Log-probs and what else is read of the policy tokens, a piece of the logits at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import make_samples
from rlhf.credit.estimator import compute_advantages
from rlhf.credit.grpo import GRPO
from rlhf.losses.reduction import Reduction
from rlhf.losses.reinforce import Reinforce
from rlhf.training.backends import token_stats
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.token_stats import Figure, TokenStats, read
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.policy.model import Lora, Policy
from tests.training import tiny

ALL: tuple[Figure, ...] = ("entropy", "log_normalizers", "mean_logprobs")


class Model(nn.Module):
    """As much of a language model as is read: its output layer, perhaps with something after it."""

    def __init__(self, weight: Tensor, *, bias: bool = False, cap: float | None = None) -> None:
        super().__init__()
        self.head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias, dtype=weight.dtype)
        self.head.weight = nn.Parameter(weight.clone())
        self.cap, self.n_calls = cap, 0

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, hidden: Tensor) -> Tensor:
        self.n_calls += 1
        logits = self.head(hidden[None])[0]
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def both(
    model: Model, hidden: Tensor, targets: Tensor, temperature: float, wanted: Any
) -> Iterator[tuple[TokenStats, Tensor, list[Tensor]]]:
    """What is read piece by piece, then of all logits at once; with the gradients of hidden states and weights."""
    torch.manual_seed(1)
    factors = torch.randn(3, len(targets))
    for piecewise in (True, False):
        given_hidden = hidden.clone().requires_grad_()
        model.zero_grad(set_to_none=True)
        if piecewise:
            found = read(model, partial(model, given_hidden), targets, temperature, wanted)
        else:
            found = TokenStats.of(model(given_hidden), targets, temperature, wanted)
        moving = (found.logprobs, found.entropy, found.log_normalizers)
        loss = sum(((f * x).sum() for f, x in zip(factors, moving, strict=True) if x is not None), torch.zeros(()))
        loss.backward()  # type: ignore[no-untyped-call]
        assert given_hidden.grad is not None
        yield found, given_hidden.grad, [p.grad for p in model.parameters() if p.grad is not None]


def assert_same(model: Model, hidden: Tensor, targets: Tensor, temperature: float, wanted: Any, atol: float) -> None:
    (found, by_hidden, by_weights), (expected, hidden_expected, weights_expected) = both(
        model, hidden, targets, temperature, wanted
    )
    for name in ("logprobs", *ALL):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=atol)
    torch.testing.assert_close(by_hidden, hidden_expected, atol=atol, rtol=atol)
    for ours, theirs in zip(by_weights, weights_expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=atol)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 9),
    piece=st.sampled_from([1, 14, 10**6]),  # a token, two of them, and more than there are
    temperature=st.sampled_from([1.0, 0.7]),
    wanted=st.sets(st.sampled_from(ALL)),
    seed=st.integers(0, 99),
)
def test_pieces_have_the_values_and_gradients_of_the_whole(
    n: int, piece: int, temperature: float, wanted: set[Figure], seed: int
) -> None:
    torch.manual_seed(seed)
    model, hidden, targets = Model(torch.randn(7, 4)), torch.randn(n, 4), torch.randint(0, 7, (n,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_stats, "PIECE", piece)
        assert_same(model, hidden, targets, temperature, wanted, 1e-6)


@pytest.mark.parametrize("piece", [14, 10**6])
def test_figures_are_those_of_the_definition(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Hidden states that are the logits themselves. Of 1, 0, 0 with the first chosen: log-normaliser ln(e + 2) =
    # 1.551445, so log-probs −.551445, −1.551445, −1.551445 with mean −1.218111, probabilities .576117, .211942, .211942
    # and entropy .576117 · .551445 + 2 · .211942 · 1.551445 = .975328. Logits of 0 have ln 3 = 1.098612 four times.
    monkeypatch.setattr(token_stats, "PIECE", piece)
    model = Model(torch.eye(3))
    hidden = torch.tensor([[1.0, 0, 0], [0, 0, 0]])
    found = read(model, lambda: model(hidden), torch.tensor([0, 2]), 1.0, ALL)
    expected = ([-0.551445, -1.098612], [0.975328, 1.098612], [1.551445, 1.098612], [-1.218111, -1.098612])
    for name, values in zip(("logprobs", *ALL), expected, strict=True):
        torch.testing.assert_close(getattr(found, name), torch.tensor(values), atol=1e-6, rtol=0)
    assert found.mean_logprobs is not None and not found.mean_logprobs.requires_grad


def test_half_precision_is_summed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    # A number of bfloat16 has 8 bits: sums over 300 pieces in it would be wrong by much more than a rounding, 2^-9.
    torch.manual_seed(0)
    model, hidden = Model(torch.randn(7, 4).bfloat16()), torch.randn(600, 4).bfloat16()
    monkeypatch.setattr(token_stats, "PIECE", 14)
    assert_same(model, hidden, torch.randint(0, 7, (600,)), 1.0, ALL, 2**-7)


def test_a_layer_that_is_frozen_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stats, "PIECE", 14)
    torch.manual_seed(0)
    model, hidden = Model(torch.randn(7, 4)), torch.randn(5, 4)
    model.head.weight.requires_grad_(False)
    assert_same(model, hidden, torch.randint(0, 7, (5,)), 1.0, ALL, 1e-6)
    assert model.head.weight.grad is None


@pytest.mark.parametrize(("settings", "n_calls"), [({"bias": True}, 1), ({"cap": 2.0}, 2)])
def test_other_output_layers_are_read_at_once(settings: dict[str, Any], n_calls: int) -> None:
    # A cap is noticed by what comes back, at the price of one more pass, once.
    torch.manual_seed(0)
    model, hidden, targets = Model(torch.randn(7, 4), **settings), torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 6])
    with torch.no_grad():
        expected = TokenStats.of(model(hidden), targets, 1.0, ALL)
        for calls in (n_calls, 1):
            model.n_calls = 0
            found = read(model, lambda: model(hidden), targets, 1.0, ALL)
            assert model.n_calls == calls
            for name in ("logprobs", *ALL):
                torch.testing.assert_close(getattr(found, name), getattr(expected, name))


def test_no_array_is_larger_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    # 64 tokens of 50 logits in pieces of 4: 200 numbers at a time, where hidden states and weights are at most 512.
    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            self.largest = max([self.largest, *(x.numel() for x in [out] if isinstance(x, Tensor))])
            return out

    monkeypatch.setattr(token_stats, "PIECE", 200)
    model, hidden, targets = Model(torch.randn(50, 8)), torch.randn(64, 8).requires_grad_(), torch.arange(64) % 50
    with Sizes() as sizes:
        found = read(model, lambda: model(hidden), targets, 0.9, ALL)
        assert found.entropy is not None and found.log_normalizers is not None
        (found.logprobs + found.entropy + found.log_normalizers).sum().backward()  # type: ignore[no-untyped-call]
    assert sizes.largest == 64 * 8
    with Sizes() as sizes:
        TokenStats.of(model(hidden), targets, 0.9, ALL)
    assert sizes.largest == 64 * 50


def untied(lora: Lora | None = None) -> Policy:
    made = tiny.policy()
    made.model.lm_head.weight = nn.Parameter(made.model.lm_head.weight.detach().clone())
    made.model.config.tie_word_embeddings = False
    if lora is not None:
        made.model = lora.wrap(made.model)
    return made


@pytest.mark.parametrize("kind", ["tied", "untied", "lora", "lora on the output layer"])
def test_an_update_does_not_depend_on_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = tiny.collect(tiny.policy())
    samples, _ = make_samples(groups, compute_advantages(GRPO(), groups))
    [batches] = pack_minibatches(samples, 1, Reduction(), 100_000)

    def updated(piece: int, layer: Any) -> dict[str, Tensor]:
        monkeypatch.setattr(token_stats, "PIECE", piece)
        monkeypatch.setattr(token_stats, "_head", layer)
        made = {
            "tied": tiny.policy,
            "untied": untied,
            "lora": partial(tiny.policy, lora=Lora()),
            "lora on the output layer": partial(untied, Lora(target_modules=("q_proj", "lm_head"))),
        }[kind]()
        trainer = TorchTrainer(made, AdamW(max_grad_norm=None), 1)
        trainer.update(batches, Reinforce(entropy_coef=0.1), temperature=0.9)
        return {name: p.grad for name, p in made.model.named_parameters() if p.grad is not None}

    head = token_stats._head
    plain = updated(1000, lambda model: None)
    for piece in (1000, 10**9):
        found = updated(piece, head)
        assert found.keys() == plain.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, plain[name], atol=1e-6, rtol=1e-4)
