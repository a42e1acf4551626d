"""Sharded policy loading: each process reads its part, and none holds all weights.

The module is made with accelerate on empty weights, a trainer lays it out over the processes, and what lies in each is
read from the safetensors files. Values, and the random numbers of adapters, are those of an ordinary load.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from rlhf.inference.embedded.model_probe import is_tested
from rlhf.training.backends.sharded import ShardInfo, empty_copy, format_of, shard_of

if TYPE_CHECKING:
    from rlhf.training.policy.model import Policy

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
#: Numbers of each tensor by which processes compare what they have read.
_COMPARED = 64


class Layout(Protocol):
    """Layout of weights over processes; equal for trainers that shard alike."""

    def lay_out(self, policy: Policy) -> Any:
        """Shard a policy's meta-device module, in all processes together.

        Returns what its trainers need to find again, if anything (`ShardedLoad.keeper`).
        """


@dataclass(frozen=True)
class SavedWeights:
    """Tensors of a model folder or hub name, read in parts.

    Attributes:
        files: file of each tensor, by its name.
    """

    files: Mapping[str, Path]

    @classmethod
    def of(cls, source: str) -> SavedWeights | None:
        """Find the safetensors files; None where there are none."""
        from safetensors import safe_open
        from transformers.utils.hub import cached_file

        quiet: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
        if index := cached_file(source, _INDEX, **quiet):
            names: Mapping[str, str] = json.loads(Path(index).read_text("utf-8"))["weight_map"]
            found = {file: Path(str(cached_file(source, file))) for file in set(names.values())}
            return cls({name: found[file] for name, file in names.items()})
        if single := cached_file(source, _SINGLE, **quiet):
            with safe_open(single, "pt") as file:
                return cls(dict.fromkeys(file.keys(), Path(single)))
        return None

    def flat(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Elements `begin` to `end` of a flattened tensor; reads the rows that hold them."""
        from safetensors import safe_open

        with safe_open(self.files[name], "pt") as file:
            rows = file.get_slice(name)
            shape = rows.get_shape()
            if not shape:
                whole: torch.Tensor = file.get_tensor(name)
                return whole.reshape(1)[begin:end]
            width = max(1, torch.Size(shape[1:]).numel())
            first = begin // width
            read: torch.Tensor = rows[first : -(-end // width)]
        return read.reshape(-1)[begin - first * width : end - first * width]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor."""
        from safetensors import safe_open

        found: dict[str, tuple[int, ...]] = {}
        for path in set(self.files.values()):
            with safe_open(path, "pt") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return found

    def missing(self, model: nn.Module) -> list[str]:
        """Names of a model's parameters that are missing or of another shape, and of stored buffers."""
        known, parameters = self.shapes(), dict(model.named_parameters())
        buffers = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
        return sorted({name for name, p in parameters.items() if known.get(name) != tuple(p.shape)} | buffers)

    def digest(self) -> str:
        """16 hex digits of names, shapes, and the first numbers of each tensor."""
        digest = hashlib.sha256()
        for name, shape in sorted(self.shapes().items()):
            first = self.flat(name, 0, min(_COMPARED, torch.Size(shape).numel()))
            digest.update(f"{name} {shape} {first.dtype};".encode() + first.float().numpy().tobytes())
        return digest.hexdigest()[:16]


@dataclass
class ShardedLoad:
    """Loads a model on empty weights, and fills it where it lies in pieces.

    Attributes:
        layout: of the trainers of all stages.
        keeper: what keeps the pieces usable while no trainer does; None where nothing has to.
    """

    layout: Layout
    keeper: Any = None
    _saved: SavedWeights | None = None
    _dtype: torch.dtype = torch.float32
    _empty: Any = None

    def loader(self, source: str, dtype: torch.dtype, options: Mapping[str, Any]) -> tuple[Any, Any, list[str]]:
        """Model without memory, tokenizer, and the names of parameters that the files do not hold."""
        from transformers import AutoTokenizer

        model = model_without_memory(source, dtype)
        self._saved, self._dtype = SavedWeights.of(source), dtype
        missing = [] if self._saved is None else self._saved.missing(model)
        return model, AutoTokenizer.from_pretrained(source), missing

    def fill(self, policy: Policy) -> Policy:
        """Lay out a policy that `loader` made, and read what lies in this process."""
        assert self._saved is not None
        self._empty = empty_copy(policy.model)
        self.keeper = self.layout.lay_out(policy)
        for name, parameter in policy.model.named_parameters():
            if (saved := name_in_files(name)) in self._saved.files:
                own, begin = shard_of(parameter)
                size = ShardInfo(parameter).ds_numel or parameter.numel()
                if (end := min(begin + own.numel(), size)) > begin:
                    read = self._saved.flat(saved, begin, end).to(self._dtype).to(format_of(parameter))
                    own[: end - begin].copy_(read)
        policy.load = self
        return policy

    @property
    def digest(self) -> str:
        """Of what was read; alike in processes that have the same files."""
        assert self._saved is not None
        return self._saved.digest()

    def whole_copy(self) -> Any:
        """A module of the policy's architecture with memory of its own, whose weights are 0."""
        model = copy.deepcopy(self._empty)
        replace_parameters(model, lambda p: torch.zeros(p.shape, dtype=p.dtype))
        return model


def can_be_sharded(source: str) -> bool:
    """True if safetensors hold every parameter under the model's own name, and the family is a tested one.

    Some architectures are stored otherwise than they compute; transformers alone knows how to load them. Others have to
    be probed with their weights in place.
    """
    try:
        saved = SavedWeights.of(source)
        model = model_without_memory(source, torch.float32)
        return saved is not None and not saved.missing(model) and is_tested(model)
    except Exception:  # an ordinary load says what is wrong
        return False


def model_without_memory(source: str, dtype: torch.dtype) -> Any:
    """Model of a folder or hub name with shapes only: each parameter shares one number."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(source)
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    model.tie_weights()
    with contextlib.suppress(OSError):  # a folder may lack one
        model.generation_config = GenerationConfig.from_pretrained(source)
    replace_parameters(model, lambda p: torch.zeros((), dtype=p.dtype).expand(p.shape))
    return model.eval()


def replace_parameters(model: nn.Module, make: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Put new parameters in the place of a model's; those that two modules share stay shared."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # with the old ones, so that no id is used twice
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                if id(p) not in made:
                    made[id(p)] = (p, nn.Parameter(make(p), p.requires_grad))
                module._parameters[name] = made[id(p)][1]


def name_in_files(name: str) -> str:
    """Name of a parameter below adapters as the files of its model have it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
