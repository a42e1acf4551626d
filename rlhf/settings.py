"""Base of settings objects: frozen pydantic dataclasses whose fields are their YAML keys."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

#: Unknown keys and silent conversions are errors; fields may hold arbitrary objects of ours.
STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True)

#: Number formats of weights and activations.
Precision = Literal["float32", "bfloat16", "float16"]
