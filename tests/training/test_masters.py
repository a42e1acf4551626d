"""float32 master weights beside weights in 16 bits."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch

from rlhf.training.backends import master_weights
from rlhf.training.backends.master_weights import MasterAdamW, forget_moments, rounded_at_random
from rlhf.training.backends.optimizer import AdamW

N_UPDATES, N = 45, 2000


def trained(
    dtype: torch.dtype, *, masters: bool = True, lr: float = 1e-6, kind: Any = None
) -> tuple[Any, Any, torch.Tensor]:
    """Weights after some updates with noisy gradients of two passes each, and how far they, or their masters, moved."""
    rng = torch.Generator().manual_seed(0)
    start = (0.02 * torch.randn(N, generator=rng)).to(torch.bfloat16)
    weights = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = AdamW(lr=lr).build([weights], masters=masters, kind=kind)
    slope = torch.randn(N, generator=rng)
    for _ in range(N_UPDATES):
        for _ in range(2):
            (weights * (slope + 0.3 * torch.randn(N, generator=rng)).to(dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    exact = optimizer.state[weights].get("master", weights.detach())
    return weights, optimizer, exact.double() - start.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_move_as_float32_and_rounded_weights_do_not(dtype: torch.dtype) -> None:
    exact = trained(torch.float32)[2]
    weights, optimizer, moved = trained(dtype)
    assert float((moved - exact).norm() / exact.norm()) < 0.01
    in_place = trained(dtype, masters=False)[2]
    assert float((in_place - exact).norm() / exact.norm()) > 0.5
    assert torch.equal(weights.detach(), optimizer.state[weights]["master"].to(dtype))


def test_float32_is_torch_itself() -> None:
    assert type(trained(torch.float32)[1]) is torch.optim.AdamW


def test_gradients_add_up_in_float32() -> None:
    weights = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    AdamW().build([weights])
    for gradient in (256.0, 1.0, 1.0):
        (weights * gradient).sum().backward()
    assert weights.grad is not None and weights.grad.dtype == torch.float32
    assert weights.grad.item() == 258  # 256 in bfloat16


def test_state_goes_on_to_the_bit() -> None:
    weights, optimizer, _ = trained(torch.bfloat16)
    saved = copy.deepcopy(optimizer.state_dict())
    again = torch.nn.Parameter(weights.detach().clone())
    resumed = AdamW(lr=1e-6).build([again])
    resumed.load_state_dict(saved)
    assert {name: value.dtype for name, value in resumed.state[again].items()} == dict.fromkeys(
        ("step", "master", "exp_avg", "exp_avg_sq"), torch.float32
    )
    for one, both in ((weights, optimizer), (again, resumed)):
        (one * torch.linspace(-1, 1, N, dtype=torch.bfloat16)).sum().backward()
        both.step()
    for name, value in optimizer.state[weights].items():
        assert torch.equal(value, resumed.state[again][name]), name
    assert torch.equal(weights, again)


def test_masters_and_moments_are_not_put_on_the_device_of_the_parameters_to_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The memory of a GPU holds neither where they are offloaded.
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    made = MasterAdamW([parameter], lr=0.1, offloads=True)
    parameter.grad = torch.ones(3)
    made.step()
    saved, names = copy.deepcopy(made.state_dict()), []
    original = torch.optim.Optimizer._process_value_according_to_param_policy

    def noted(parameter: Any, value: Any, number: int, groups: Any, key: Any = None) -> Any:
        names.append(key)
        return original(parameter, value, number, groups, key)

    monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(noted))
    made.load_state_dict(saved)
    assert set(names) == {"step"} and set(made.state[parameter]) == {"step", "exp_avg", "exp_avg_sq", "master"}


def test_a_state_without_masters_begins_with_the_weights() -> None:
    """As other optimisers, and older checkpoints, save it."""
    weights, optimizer, _ = trained(torch.bfloat16)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["master"]
    again = torch.nn.Parameter(weights.detach().clone())
    resumed = AdamW(lr=1e-3).build([again])
    resumed.load_state_dict(saved)
    again.grad = torch.ones(N)
    resumed.step()
    assert float((resumed.state[again]["master"] - weights.detach().float()).abs().max()) < 1e-2


def test_two_optimizers_of_the_same_weights_add_up() -> None:
    """As a policy's and that of a critic on its backbone."""
    weights = torch.nn.Parameter(torch.full((N,), 0.25, dtype=torch.bfloat16))
    both = [AdamW(lr=1e-4).build([weights]) for _ in range(2)]
    for _ in range(50):
        for optimizer, sign in zip(both, (1.0, 2.0), strict=True):
            weights.grad = torch.full((N,), sign)
            optimizer.step()
    # Each moves by its rate in each of 50 steps; neighbours of .24 in bfloat16 are .001 apart.
    assert weights.mean().item() == pytest.approx(0.25 - 2 * 50 * 1e-4, abs=1.5e-3)


def test_forgotten_moments_leave_masters() -> None:
    weights, optimizer, _ = trained(torch.bfloat16)
    exact = optimizer.state[weights]["master"].clone()
    assert not torch.equal(exact, weights.detach().float())
    forget_moments(optimizer)
    assert set(optimizer.state[weights]) == {"master"}
    weights.grad = torch.zeros(N)
    optimizer.step()
    assert torch.equal(optimizer.state[weights]["master"], exact)
    plain = trained(torch.float32)[1]
    forget_moments(plain)
    assert not plain.state


def test_mixed_formats_and_groups() -> None:
    """A float32 head beside a bfloat16 backbone, each with its own rate; what has no gradient stays."""
    backbone, head = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), torch.nn.Parameter(torch.ones(3))
    still = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = AdamW(lr=0.1).build([backbone, still])
    optimizer.add_param_group({"params": [head], "lr": 0.2})
    (backbone.float().sum() + head.sum()).backward()
    optimizer.step()
    assert isinstance(optimizer, MasterAdamW)
    assert torch.allclose(optimizer.state[backbone]["master"], torch.full((3,), 0.9), atol=1e-5)
    assert torch.allclose(head, torch.full((3,), 0.8), atol=1e-5)
    assert "master" not in optimizer.state[head] and not optimizer.state[still]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_moments_in_16_bits_move_weights_alike(dtype: torch.dtype) -> None:
    exact = trained(dtype)[2]
    _, optimizer, moved = trained(dtype, kind=partial(MasterAdamW, moments=torch.bfloat16))
    [state] = optimizer.state.values()
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert float((moved - exact).norm() / exact.norm()) < 0.02


def test_what_is_offloaded_is_updated_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In runs of a few tensors; on a CPU they go nowhere."""
    monkeypatch.setattr(master_weights, "_AT_A_TIME", 12)
    shapes, found = ((3, 4), (5,), (20,), (2, 2)), []
    for kind in (MasterAdamW, partial(MasterAdamW, offloads=True)):
        rng = torch.Generator().manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(s, generator=rng, dtype=torch.bfloat16)) for s in shapes]
        optimizer = AdamW(lr=0.1, weight_decay=0.1).build(weights, kind=kind)
        for _ in range(3):
            for p in weights[1:]:  # the first has no gradient
                p.grad = torch.randn(p.shape, generator=rng)
            optimizer.step()
        found.append([*weights, *(v for p in weights[1:] for v in optimizer.state[p].values())])
        assert not optimizer.state[weights[0]]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_rounding_at_random_is_right_on_average() -> None:
    value = torch.tensor([1.001, -3.0007, 1e-12, 0.0, 7.0])
    drawn = torch.stack([rounded_at_random(value, seed) for seed in range(4000)])
    neighbours = [set(column.tolist()) for column in drawn.T]
    assert [len(n) for n in neighbours] == [2, 2, 2, 1, 1]  # the two nearest, or the number itself
    # Four standard errors of a number between two neighbours, which are 2^-7 apart.
    assert torch.allclose(drawn.double().mean(0), value.double(), rtol=4 * 2**-8 / 4000**0.5, atol=0)
    assert torch.equal(drawn[7], rounded_at_random(value, 7))


def test_moments_in_16_bits_go_on_to_the_bit() -> None:
    kind = partial(MasterAdamW, moments=torch.bfloat16)
    weights, optimizer, _ = trained(torch.bfloat16, kind=kind)
    again = torch.nn.Parameter(weights.detach().clone())
    resumed = AdamW(lr=1e-6).build([again], kind=kind)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, both in ((weights, optimizer), (again, resumed)):
        one.grad = torch.linspace(-1, 1, N)
        both.step()
    assert all(torch.equal(value, resumed.state[again][name]) for name, value in optimizer.state[weights].items())
