"""AdamW over 16-bit weights with float32 master weights, gradients and moments.

At a learning rate of 1e-6 an update is smaller than half a step between two neighbouring bfloat16 numbers, so weights
that are updated in place stay where they are. Here the update is made to a float32 copy, and rounded to the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.adamw import adamw

#: Of the state of a parameter, what is float32 whatever the parameter is.
_EXACT = ("master", "exp_avg", "exp_avg_sq")


class MasterAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) whose parameters in 16 bits have a master copy in float32.

    The state of such a parameter holds `master` beside torch's `step`, `exp_avg` and `exp_avg_sq`, all of its shape and
    float32. A state without masters, as other optimisers save it, begins with those of the present weights. Gradients
    of several backward passes add up in float32. Parameters in float32 are updated as torch does it.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
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
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            for p in given:
                self._begin(p)
            targets = [self.state[p].get("master", p) for p in given]
            beta1, beta2 = group["betas"]
            adamw(
                targets,
                [p.grad.to(target.dtype) for p, target in zip(given, targets, strict=True)],
                [self.state[p]["exp_avg"] for p in given],
                [self.state[p]["exp_avg_sq"] for p in given],
                [],
                [self.state[p]["step"] for p in given],
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
            rounded = [(p, self.state[p]["master"]) for p in given if is_short(p)]
            if rounded:
                torch._foreach_copy_([p for p, _ in rounded], [master for _, master in rounded])

    def _begin(self, p: torch.nn.Parameter) -> None:
        state = self.state[p]
        if not state:
            on_gpu = p.device if self.defaults["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=on_gpu)
            for name in _EXACT[1:]:
                state[name] = torch.zeros_like(p, dtype=torch.float32, memory_format=torch.preserve_format)
        if is_short(p) and "master" not in state:
            state["master"] = p.detach().float()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state, as torch does, without rounding float32 to the parameters' format."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(number, {})
            for name in _EXACT:
                if name in saved:
                    self.state[p][name] = saved[name].to(device=p.device, dtype=torch.float32, copy=True)


def is_short(parameter: torch.Tensor) -> bool:
    """True if a parameter's format is too coarse to be updated in place."""
    return parameter.dtype in (torch.bfloat16, torch.float16)
