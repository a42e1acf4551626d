"""ZeRO's optimiser state gathered by parameter, in one form for any stage and process count.

AdamW looks at each number by itself, so whole moments, cut anew, continue a run exactly wherever the pieces lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rlhf.errors import TrainingError
from rlhf.processes import current
from rlhf.training.backends.sharded import ShardInfo

#: Of AdamW, by the names torch gives them.
_MOMENTS = ("exp_avg", "exp_avg_sq")

#: Of DeepSpeed's scaler of float16 losses.
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class GatheredOptimizerState:
    """Optimiser state of a checkpoint, gathered from all processes.

    Args:
        engine: DeepSpeed's, whose module's trained parameters these are.
        zero: its stage.
        keeps: whether this process writes checkpoints; the others get an empty state.
        has_master_weights: whether weights in float32 lie beside those of the module.
    """

    def __init__(self, engine: Any, zero: int, *, keeps: bool, has_master_weights: bool) -> None:
        self._engine, self._zero, self._keeps = engine, zero, keeps
        self._names = (*_MOMENTS, *(("master",) if has_master_weights else ()))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups whose learning rate counts."""
        groups: list[dict[str, Any]] = self._engine.optimizer.param_groups
        return groups

    @property
    def state(self) -> Any:
        """The piece of this process; emptied, the means begin anew."""
        return self._engine.basic_optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of an update that was left out; under ZeRO DeepSpeed does so itself."""
        if self._zero == 0:
            self._engine.zero_grad()

    def prepare(self) -> None:
        """Before an update: let DeepSpeed look anew for moments that were forgotten."""
        if not self.state and hasattr(self._engine.optimizer, "_hp_optimizer_states_linked"):
            self._engine.optimizer._hp_optimizer_states_linked = False

    @contextmanager
    def without_means(self, parameters: Sequence[Any]) -> Iterator[None]:
        """Context of an update that leaves some parameters as they are, whose gradients are zero: without their means.

        All processes enter it together.
        """
        kept = [(p, key, self._whole(p, key).detach().clone()) for p in parameters for key in _MOMENTS if self.state]
        for p, key, value in kept:
            self._set(p, key, torch.zeros_like(value))
        yield
        for p, key, value in kept:
            self._set(p, key, value)

    def state_dict(self) -> dict[str, Any]:
        """Steps, moments and weights in float32 by the parameters' names. All processes call it together."""
        if self.state:
            self._check_links()
        names = self._names if self.state else self._names[len(_MOMENTS) :]
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in self._trained() if names else ():
            values = {key: self._whole(parameter, key) for key in names}
            if self._keeps:
                found[name] = {key: value.detach().to("cpu", copy=True) for key, value in values.items()}
        n_steps = int(next(iter(self.state.values()))["step"]) if self.state else 0
        return {"n_steps": n_steps, "parameters": found, "scaler": self._scaler()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from there; each process takes its piece. Raises ValueError for the state of another model."""
        parameters = dict(self._trained())
        if "param_groups" in saved:
            saved = named(saved, list(parameters))
        self._set_scaler(saved["scaler"])
        if not saved["parameters"]:
            return
        shapes = {name: tuple(ShardInfo(p).ds_shape or p.shape) for name, p in parameters.items()}
        theirs = {name: tuple(next(iter(values.values())).shape) for name, values in saved["parameters"].items()}
        if shapes != theirs:
            differing = sorted(set(shapes.items()) ^ set(theirs.items()))[0]
            raise ValueError(f"another model's state: {differing[0]} of shape {differing[1]}")
        if saved["n_steps"]:
            self._begin(saved["n_steps"])
        for name, parameter in parameters.items():
            for key in self._names:
                if key in saved["parameters"][name]:
                    self._set(parameter, key, saved["parameters"][name][key])

    def _begin(self, n_steps: int) -> None:
        """Make room for moments, as after `n_steps` updates."""
        is_fused = any(group.get("fused") for group in self.param_groups)  # it wants the count beside its parameter
        for flat in self._flat():
            step = torch.tensor(float(n_steps), device=flat.device if is_fused else "cpu")
            self.state[flat] = {"step": step, **{name: torch.zeros_like(flat) for name in _MOMENTS}}
        if self._zero in (1, 2):
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _check_links(self) -> None:
        """Raise TrainingError where DeepSpeed lost its optimiser state, which would be saved as zeros."""
        if self._zero not in (1, 2):
            return
        links = [ShardInfo(p)._hp_mapping for _, p in self._trained()]
        n_here = sum(link.hp_fragment.numel() for link in links if link is not None and link.optim_fragment)
        n_found = sum(current().gather(n_here, "the optimiser's state"))
        n_wanted = sum(p.numel() for _, p in self._trained())
        if n_found != n_wanted:
            raise TrainingError(
                "DeepSpeed does not say where the optimiser's state lies",
                where="trainer",
                got=f"the state of {n_found} numbers",
                expected=f"that of {n_wanted} trained ones",
            )

    def _trained(self) -> Iterator[tuple[str, Any]]:
        return ((name, p) for name, p in self._engine.module.named_parameters() if p.requires_grad)

    def _flat(self) -> list[torch.Tensor]:
        """The tensors that the inner optimiser updates in this process."""
        optimizer = self._engine.optimizer
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            if hasattr(optimizer, name):
                return list(getattr(optimizer, name))
        return [p for group in optimizer.param_groups for p in group["params"]]

    def _whole(self, parameter: Any, key: str) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self._zero == 0:
            moment: torch.Tensor = self.state[parameter][key]
            return moment
        whole = (
            safe_get_full_fp32_param(parameter) if key == "master" else safe_get_full_optimizer_state(parameter, key)
        )
        found: torch.Tensor = whole.reshape(ShardInfo(parameter).ds_shape or parameter.shape)
        return found

    def _set(self, parameter: Any, key: str, value: torch.Tensor) -> None:
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        if self._zero == 0:
            self.state[parameter][key].copy_(value)
        elif self._zero == 3:
            piece = _piece(value, parameter.ds_tensor.numel(), self._rank_of(parameter))
            if key == "master":
                safe_set_local_fp32_param(parameter, piece)
            else:
                safe_set_local_optimizer_state(parameter, piece, key)
        elif key == "master":
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)

    def _rank_of(self, parameter: Any) -> int:
        rank: int = self._engine.optimizer._get_param_partition_rank(parameter)
        return rank

    def _scaler(self) -> dict[str, float]:
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        return {name: float(getattr(scaler, name)) for name in _SCALER if getattr(scaler, name, None) is not None}

    def _set_scaler(self, saved: Mapping[str, float]) -> None:
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        for name, value in saved.items():
            setattr(scaler, name, value if name == "cur_scale" else int(value))


def named(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the state of plain torch's AdamW, which goes by numbers, as `GatheredOptimizerState.state_dict` has it.

    Args:
        saved: `state_dict` of an optimiser over all trained parameters, in order.
        names: of these.

    Raises:
        ValueError: there are more or fewer of them, or they were not all updated equally often.
    """
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(numbers) != len(names):
        raise ValueError(f"another model's state: {len(numbers)} trained parameters, and here are {len(names)}")
    found = {name: saved["state"].get(number, {}) for number, name in zip(numbers, names, strict=True)}
    steps = {int(values["step"]) for values in found.values() if "step" in values}
    if len(steps) > 1 or (steps and not all("step" in values for values in found.values())):
        raise ValueError(f"the parameters have been updated {sorted(steps)} times; DeepSpeed counts them together")
    kept = (*_MOMENTS, "master")
    parameters = {name: {key: values[key] for key in kept if key in values} for name, values in found.items() if values}
    return {"n_steps": max(steps, default=0), "parameters": parameters, "scaler": {}}


def numbered(saved: Mapping[str, Any], names: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what `GatheredOptimizerState.state_dict` made as plain torch's AdamW takes it.

    Args:
        saved: by names.
        names: of the trained parameters, in the order of the optimiser.
        groups: its own `param_groups`.

    Raises:
        ValueError: the state of other parameters.
    """
    found = saved["parameters"]
    if found and set(names) != set(found):
        differing = sorted(set(names) ^ set(found))[0]
        raise ValueError(f"another model's state: {differing} is in one of the two only")
    n_steps = saved["n_steps"]
    state = {
        number: {**({"step": torch.tensor(float(n_steps))} if n_steps else {}), **of}
        for number, of in enumerate(found[name] for name in (names if found else ()))
    }
    return {"state": state, "param_groups": list(groups)}


def _piece(value: torch.Tensor, size: int, number: int) -> torch.Tensor:
    """Return piece `number` of `size` numbers of a flattened tensor, the last one filled up with zeros."""
    flat = value.flatten()[number * size : (number + 1) * size]
    return torch.nn.functional.pad(flat, (0, size - len(flat)))
