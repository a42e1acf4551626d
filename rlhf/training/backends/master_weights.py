"""AdamW over 16-bit weights with float32 master weights, gradients and moments.

At a learning rate of 1e-6 an update is smaller than half a step between two neighbouring bfloat16 numbers, so weights
that are updated in place stay where they are. Here the update is made to a float32 copy, and rounded to the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.adamw import adamw

#: Of the state of a parameter, what does not have its number format.
_EXACT = ("master", "exp_avg", "exp_avg_sq")

#: Numbers whose moments are brought to the GPU, or computed in float32, at a time.
_AT_A_TIME = 2**26


class MasterAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) whose parameters in 16 bits have a master copy in float32.

    The state of such a parameter holds `master` beside torch's `step`, `exp_avg` and `exp_avg_sq`, all of its shape. A
    state without masters, as other optimisers save it, begins with those of the present weights. What another optimiser
    of the same parameters has changed since the last update is added to the masters. Gradients of several
    backward passes add up in float32, and so is the arithmetic of an update. Parameters in float32 are updated as torch
    does it.

    Args:
        params: as torch has them.
        moments: number format that moments are kept in; in bfloat16 they are rounded stochastically.
        offloads: whether masters and moments lie in the memory of the CPU between updates.
        options: of torch's AdamW.
    """

    def __init__(
        self, params: Iterable[Any], *, moments: torch.dtype = torch.float32, offloads: bool = False, **options: Any
    ) -> None:
        self._moments, self._offloads = moments, offloads
        self._written: dict[Any, int] = {}  # parameter -> torch's count of its changes after the last update here
        super().__init__(params, **options)
        for group in self.param_groups:
            self._accumulate_exactly(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch does."""
        super().add_param_group(param_group)
        self._accumulate_exactly(self.param_groups[-1])

    @staticmethod
    def _accumulate_exactly(group: Mapping[str, Any]) -> None:
        for p in group["params"]:
            if is_short(p):
                p.grad_dtype = torch.float32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        number, turn = 0, None
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            for p in given:
                self._begin(p)
            if turn is None and given and self._moments == torch.bfloat16:
                turn = int(self.state[given[0]]["step"])
            whole = self._moments == torch.float32 and not self._offloads
            for some in [given] if whole else _at_a_time(given):
                self._update(some, group, number + 1_000_003 * (turn or 0))
                number += len(some)

    def _update(self, given: list[Any], group: Mapping[str, Any], number: int) -> None:
        """Update some parameters of a group; random numbers of the rounding begin at `number`."""
        states = [self.state[p] for p in given]
        held = [
            {name: _brought(state[name], p.device) for name in _EXACT if name in state}
            for p, state in zip(given, states, strict=True)
        ]
        for p, there in zip(given, held, strict=True):
            if "master" in there and self._written.get(p) != p._version:
                there["master"].add_(p.float() - there["master"].to(p.dtype).float())
        targets = [there.get("master", p) for p, there in zip(given, held, strict=True)]
        beta1, beta2 = group["betas"]
        adamw(
            targets,
            [p.grad.to(target.dtype) for p, target in zip(given, targets, strict=True)],
            [there["exp_avg"] for there in held],
            [there["exp_avg_sq"] for there in held],
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        rounded = [(p, target) for p, target in zip(given, targets, strict=True) if is_short(p)]
        if rounded:
            torch._foreach_copy_([p for p, _ in rounded], [master for _, master in rounded])
            self._written |= {p: p._version for p, _ in rounded}
        for i, (state, there) in enumerate(zip(states, held, strict=True), start=number):
            for name, value in there.items():
                if value is not state[name]:
                    is_rounded = state[name].dtype == torch.bfloat16
                    seed = len(_EXACT) * i + _EXACT.index(name)
                    state[name].copy_(rounded_at_random(value, seed) if is_rounded else value, non_blocking=True)

    def _begin(self, p: torch.nn.Parameter) -> None:
        state = self.state[p]
        if "step" not in state:
            on_gpu = p.device if self.defaults["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=on_gpu)
            for name in _EXACT[1:]:
                moment = torch.zeros_like(p, dtype=self._moments, memory_format=torch.preserve_format)
                state[name] = self._placed(moment)
        if is_short(p) and "master" not in state:
            state["master"] = self._placed(p.detach().float())

    def _placed(self, value: torch.Tensor) -> torch.Tensor:
        """Value in the memory that it has between updates; on the CPU it is pinned for a GPU."""
        if not self._offloads:
            return value
        there = value.to("cpu")
        return there.pin_memory() if value.is_cuda else there

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state, as torch does, without rounding it to the parameters' format."""
        state = state_dict["state"]
        rest = {number: {k: v for k, v in of.items() if k not in _EXACT} for number, of in state.items()}
        super().load_state_dict({**state_dict, "state": rest})  # which would put all of it on the parameters' device
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(number, {})
            for name in _EXACT:
                if name in saved:
                    wanted = torch.float32 if name == "master" else self._moments
                    self.state[p][name] = self._placed(saved[name].to(device=p.device, dtype=wanted, copy=True))


def forget_moments(optimizer: Any) -> None:
    """Begin the means of an optimiser anew; masters stay."""
    kept = {p: {"master": state["master"]} for p, state in optimizer.state.items() if "master" in state}
    optimizer.state.clear()
    optimizer.state.update(kept)


def _at_a_time(parameters: list[Any]) -> Iterator[list[Any]]:
    """Parameters in runs of so few numbers that what is computed of them in float32 takes little memory."""
    found, n = list[Any](), 0
    for p in parameters:
        if found and n + p.numel() > _AT_A_TIME:
            yield found
            found, n = [], 0
        found.append(p)
        n += p.numel()
    if found:
        yield found


def _brought(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Float32 copy of a value on a device, or the value itself where it is that."""
    if value.dtype == torch.float32 and value.device == device:
        return value
    return value.to(device, torch.float32, non_blocking=True)


def rounded_at_random(value: torch.Tensor, seed: int) -> torch.Tensor:
    """Float32 numbers rounded to bfloat16, up as often as they are near the upper neighbour: right on average.

    Sixteen random bits are added to those that are cut off; one seed gives one result.
    """
    random = torch.Generator(value.device).manual_seed(seed)
    noise = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=random)
    bits = value.contiguous().view(torch.int32) + noise
    return (bits & -65536).view(torch.float32).to(torch.bfloat16)


def is_short(parameter: torch.Tensor) -> bool:
    """True if a parameter's format is too coarse to be updated in place."""
    return parameter.dtype in (torch.bfloat16, torch.float16)
