"""References and DoRA under real DeepSpeed in two processes: the curve is that of plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlhf.batching.samples import Sample
from rlhf.losses.ppo_clip import PPOClip
from rlhf.processes import current
from rlhf.training.backends.settings import Torch
from rlhf.training.policy.model import Lora
from tests.training.test_deepspeed import KINDS, SMOOTH, Curve, assert_same, in_rows, rows
from tests.training.tiny import policy
from tests.training.together import together

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

DORA = Lora(rank=2, dora=True)
#: Ratios stay near 1, and so do the differences of rounding.
SLOW = replace(SMOOTH, lr=0.02)


def near_the_beginning(kind: Any, samples: Sequence[Sample], folder: Path, lora: Lora | None = None) -> Curve:
    """Updates that are held near the policy of the beginning: a frozen copy, or the base of adapters."""
    made = policy(lora=lora)
    made.save(folder / "policy")
    current().gather(None, "the first process has written it")
    trainer = kind.start(made, SLOW, 3)
    made.keep_reference(folder)
    found = [trainer.update(in_rows(samples, 3), PPOClip(kl="k3", kl_coef=0.5)) for _ in range(3)]
    trainer.close()
    return found


def work(rank: int, folder: Path) -> dict[str, Curve]:
    samples = rows()
    found = {name: near_the_beginning(kind, samples, folder) for name, kind in KINDS.items()}
    return found | {
        f"dora {name}": near_the_beginning(KINDS[name], samples, folder, DORA) for name in ("zero1", "zero2")
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Curve]]:
    return together(work, tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize("name", [*KINDS, "dora zero2"])
def test_the_reference_stays_where_it_was(seen: list[dict[str, Curve]], name: str, tmp_path: Path) -> None:
    expected = near_the_beginning(Torch(), rows(), tmp_path, DORA if name.startswith("dora") else None)
    divergences = [values["loss/kl_ref"] for values in expected]
    assert divergences[0] == pytest.approx(0, abs=1e-5) and divergences[-1] > 1e-4
    for found in seen:
        assert_same(found[name], expected)
