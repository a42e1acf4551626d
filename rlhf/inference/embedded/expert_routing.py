"""Expert routing of a mixture of experts: recorded in one forward pass, replayed in later ones.

An update may move a router so far that a token is routed to other experts than when it was sampled, and the ratio of
its probabilities jumps. With routing replay (Zheng et al., arXiv 2507.18071, section 5.3) all updates of a step use the
experts that were chosen before the first; the router still learns, by the weights that it gives these experts.

`T`, `L`, `K` are tokens, layers with experts, and experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlhf.errors import ModelError
from rlhf.inference.embedded.row_layout import PackedRows
from rlhf.inference.model_config import ModelWrapper

#: Routing of rows: int16 `[T, L, K]`, activated experts of each token in each layer; −1 where they are not known.
Experts = npt.NDArray[np.int16]

_TOPK = (torch.topk, Tensor.topk)


class ExpertRouting:
    """Records the activated experts of each token in a forward pass, or replays recorded ones.

    A setting holds until the next pass begins, because a backward pass may recompute layers.

    Args:
        model: of transformers, whose routers choose by `topk` among `num_experts`.

    Attributes:
        routers: of the layers, in order.

    Raises:
        ModelError: it has no such router, or one whose weights for replayed experts would be 0.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = [module for module in model.modules() if _is_router(module)]
        if not self.routers:
            raise ModelError(
                "the routing of this model cannot be replayed",
                where=type(ModelWrapper(model).base).__name__,
                got="no layer with a router of experts",
                expected="a mixture of experts of transformers, such as qwen3_moe, mixtral or gpt_oss",
                hint="remove routing_replay",
            )
        masked = [r for r in self.routers if vars(r).get("topk_method") == "group_limited_greedy"]
        if masked:
            raise ModelError(
                "the routing of this model cannot be replayed",
                where=type(masked[0]).__name__,
                got="a router that sets the scores of other groups of experts to 0",
                expected="one that weighs experts by unmasked scores, as deepseek_v3 does",
                hint="remove routing_replay",
            )
        self._given: Tensor | None = None  # [T, L, K], of all places of the rows
        self._replayed: Tensor | None = None  # [n_computed, L, K]
        self._recorded: list[Tensor | None] | None = None
        self._rows: PackedRows | None = None
        self._select: Tensor | None = None
        self._pass: dict[int, tuple[Tensor, int]] = {}  # layer -> changed choices and all, of the last replayed pass
        self._passes: list[tuple[Tensor, int]] = []

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which routers record or replay."""
        with ExitStack() as stack:
            for layer, router in enumerate(self.routers):
                stack.enter_context(_routed(router, self, layer))
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which passes choose their own experts; the settings from before are restored afterwards."""
        before = self._given, self._replayed, self._rows, self._select
        self.replay(None)
        try:
            yield
        finally:
            self._given, self._replayed, self._rows, self._select = before

    def replay(self, experts: Tensor | None) -> None:
        """Replay `experts` `[T, L, K]` in the next pass over rows; None: its own, which `record` may have it keep."""
        self._given, self._replayed = experts, None
        self._recorded = None if experts is not None else self._recorded

    def record(self) -> None:
        """Record the experts that the next pass over rows chooses."""
        self.replay(None)
        self._recorded = [None] * len(self.routers)

    def begin(self, rows: PackedRows, select: Tensor | None) -> None:
        """Set the tokens that the pass computes which now begins, and which of them are read.

        Rows that share a prompt share its routing: that of any of them which has one.

        Raises:
            ModelError: the routing is of another model.
        """
        self._rows, self._select, given = rows, select, self._given
        if given is not None and given.shape[1] != len(self.routers):
            raise ModelError(
                "this routing is of another model",
                where="ExpertRouting",
                got=f"experts of {given.shape[1]} layers",
                expected=f"of {len(self.routers)} layers",
            )
        if given is None:
            self._replayed = None
            return
        self._flush()
        places, known = rows.kept.to(given.device).clone(), (given[:, 0, 0] >= 0).nonzero()[:, 0]
        places[rows.token_of.to(given.device)[known]] = known
        self._replayed = given.index_select(0, places)

    def recorded(self) -> Experts:
        """Return the experts of the recorded pass. Raises ModelError where a router chose none by `topk`."""
        found = [one for one in self._recorded or () if one is not None]
        if self._rows is None or len(found) != len(self.routers):
            raise ModelError(
                "the routing of this model cannot be recorded",
                where=type(self.routers[0]).__name__,
                got=f"a choice in {len(found)} of {len(self.routers)} layers",
                expected="one topk over the experts in each",
                hint="remove routing_replay",
            )
        self._recorded = None
        whole: Experts = torch.stack(found, 1).cpu().numpy()[self._rows.token_of.cpu().numpy()]
        return whole

    def changed(self) -> tuple[int, int]:
        """Replayed choices since the last call that routers would not have made, and all of them."""
        self._flush()
        n = int(torch.stack([n for n, _ in self._passes]).sum()) if self._passes else 0
        of, self._passes = sum(of for _, of in self._passes), []
        return n, of

    def uncount(self) -> None:
        """Leave the last replayed pass out of `changed`."""
        self._pass = {}

    def _flush(self) -> None:
        self._passes += self._pass.values()
        self._pass = {}

    def chosen(self, layer: int, scores: Tensor, own: Tensor) -> Any:
        """Return the `topk` of a layer where it is not `own` `[T, K]`, else None."""
        if self._recorded is not None:
            self._recorded[layer] = own.detach().to(torch.int16)
        if self._replayed is None:
            return None
        given = self._replayed[:, layer].to(own.device, torch.int64)
        experts = torch.where(given < 0, own, given)
        if torch.is_grad_enabled():
            met = (own[:, :, None] == experts[:, None, :]).any(-1)
            met = met if self._select is None else met.index_select(0, self._select.to(met.device))
            self._pass[layer] = (~met).sum(), met.numel()  # again where the layer is recomputed
        return torch.return_types.topk((scores.gather(-1, experts), experts))


@contextmanager
def _routed(router: nn.Module, routing: ExpertRouting, layer: int) -> Iterator[None]:
    """Context in which what the router chooses goes by way of `routing`."""
    inner, before = router.forward, vars(router).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Choice(routing, layer, vars(router)["num_experts"], vars(router)["top_k"]):
            return inner(*args, **kwargs)

    router.forward = forward
    try:
        yield
    finally:
        del router.forward
        if before is not None:
            router.forward = before


class _Choice(TorchFunctionMode):
    """Context in which the `topk` over all experts is that of `ExpertRouting.chosen`."""

    def __init__(self, routing: ExpertRouting, layer: int, n_experts: int, k: int) -> None:
        super().__init__()
        self._routing, self._layer, self._n, self._k = routing, layer, n_experts, k

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return out
        scores, own = args[0], out[1]
        if own.ndim != 2 or own.shape[1] != self._k or scores.shape[-1] != self._n:  # of groups of experts
            return out
        return self._routing.chosen(self._layer, scores, own) or out


def _is_router(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("Router", "Gate")) and {"top_k", "num_experts"} <= vars(module).keys()
