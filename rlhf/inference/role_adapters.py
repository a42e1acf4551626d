"""Role adapters: each policy call uses its role's adapter, all in one forward pass.

All adapters are active at once, and what each adds to a token's hidden state is multiplied by 1 for the tokens of its
own rows and by 0 for the others'. So rows of several roles share a batch, a pack and a backward pass, and an adapter
gets a gradient from its own rows only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rlhf.errors import EngineError, ModelError, nearest
from rlhf.inference.model_config import ModelWrapper

#: PEFT's name of the adapter that roles without one of their own share; `Prompt.adapter` is empty for it.
SHARED = "default"

Ints = npt.NDArray[np.int64]


class RoleAdapters:
    """Says for each token of a forward pass which adapter reads it. Lives as an attribute of the model it is made for.

    What is said holds until the next forward pass says something else, because a backward pass may compute the forward
    pass again.

    Args:
        model: PEFT's, with LoRA adapters `SHARED` and `names`, all active.
        names: of the roles that have an adapter of their own, at least one.

    Raises:
        ModelError: a layer has adapters of another kind.
    """

    def __init__(self, model: Any, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.say(None)
        for path, layer in model.named_modules():
            if not hasattr(layer, "lora_B"):
                continue
            if set(layer.lora_B) != {SHARED, *self.names} or len(layer.lora_magnitude_vector):
                raise ModelError(
                    "this layer cannot have an adapter for each role",
                    where=path,
                    got=f"{type(layer).__name__} with {', '.join(layer.lora_B) or 'no plain adapter'}",
                    expected="a linear layer with plain LoRA",
                    hint="name linear layers in policy.lora.target_modules, or remove policy.lora.roles",
                )
            for number, name in enumerate((SHARED, *self.names)):
                layer.lora_B[name].register_forward_hook(_Own(self, number))

    def say(self, numbers: Ints | None, device: torch.device | str = "cpu") -> None:
        """Set the adapter number of each token, `[T]`, for the passes that follow; None: the shared one for all.

        Args:
            numbers: on the host, where they are looked at.
            device: where the model runs.
        """
        of_each = np.zeros(1, np.int64) if numbers is None else numbers
        self._own = [_own_tokens(of_each == i, device) for i in range(1 + len(self.names))]

    def of_tokens(self, added: Tensor, number: int) -> Tensor:
        """Output of an adapter, `[1, T, M]`, on its own tokens alone."""
        own = self._own[number]
        return added if own is None else added * own


def _own_tokens(own: npt.NDArray[np.bool_], device: torch.device | str) -> Tensor | float | None:
    """Mask factor of an adapter's output, where `own` `[T]` are its tokens; None: no masking."""
    if own.all():
        return None
    return torch.from_numpy(own)[None, :, None].to(device) if own.any() else 0.0


class _Own:
    """A hook after the second factor of an adapter. An object, so that a copy of the model has its own."""

    def __init__(self, adapters: RoleAdapters, number: int) -> None:
        self._adapters, self._number = adapters, number

    def __call__(self, _module: nn.Module, _inputs: Any, added: Tensor) -> Tensor:
        return self._adapters.of_tokens(added, self._number)


def route(model: Any, names: Sequence[str]) -> Any:
    """Return PEFT's `model` with all adapters active and trainable, each on its own role's tokens."""
    model.base_model.set_adapter([SHARED, *names])
    model.role_adapters = RoleAdapters(model, names)
    return model


def refuse_names(model: Any, names: Sequence[str]) -> None:
    """Raise ModelError for a role whose name PEFT would confuse with a part of `model`.

    PEFT tells the tensors of adapters apart by the parts of their names: with an adapter `0`, the shared one would be
    written without its first layer.
    """
    parts = {part for path, _ in model.named_modules() for part in path.split(".")} | {"weight", "bias"}
    for name in names:
        if name in parts or hasattr(nn.ModuleDict, name):
            raise ModelError(
                "a role with an adapter has the name of a module of the model",
                where="policy.lora.roles",
                got=repr(name),
                expected="a name that no module of the model has",
                hint="give the role another name, or remove it from policy.lora.roles",
            )


def role_adapters(model: Any) -> RoleAdapters | None:
    """Router of role adapters in `model`, or in a wrapped module; None: all roles share one."""
    found: RoleAdapters | None = ModelWrapper(ModelWrapper(model).inner).role_adapters
    return found


def refuse_roles(model: Any) -> None:
    """Raise ModelError where roles have adapters of their own: they are no one set of weights."""
    found = role_adapters(model)
    if found is not None:
        raise ModelError(
            "adapters of several roles cannot be merged into one set of weights",
            where="policy.lora.roles",
            got=f"an adapter for each of {', '.join(found.names)}, and one for all others",
            expected="full weights, or one adapter",
            hint="the folder of a checkpoint's policy has every adapter as PEFT writes it; merge the one you need",
        )


def adapter_names(model: Any) -> tuple[str, ...]:
    """Adapter names of `model`, the shared one (empty name) first."""
    found = role_adapters(model)
    return ("", *(found.names if found is not None else ()))


def number_of(model: Any, name: str, where: str) -> int:
    """Number of the adapter of a role, 0 for the shared one.

    Raises:
        EngineError: the model has none of this role; said of `where`.
    """
    names = adapter_names(model)
    if name not in names:
        raise EngineError(
            "the model has no adapter of this role",
            where=where,
            got=repr(name),
            expected=", ".join(map(repr, names)),
            hint=nearest(name, names),
        )
    return names.index(name)


def unused_parameters(model: Any, used: Collection[str]) -> list[Any]:
    """Parameters of the adapters of roles that are not `used`; a model without such adapters has none."""
    if role_adapters(model) is None:
        return []
    adapters = ((adapter_of(path), parameter) for path, parameter in model.named_parameters())
    return [parameter for name, parameter in adapters if name is not None and name not in used]


def adapter_of(path: str) -> str | None:
    """Adapter of a named parameter, empty for the shared one; None for one of the base.

    `model.layers.0.mlp.up_proj.lora_A.plan.weight` belongs to `plan`.
    """
    _, found, after = path.partition(".lora_A." if ".lora_A." in path else ".lora_B.")
    name = after.partition(".")[0] if found else None
    return "" if name == SHARED else name
