"""Old module and class names: they import what they became, with a warning that names it."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import warnings

import pytest

from rlhf.moved import new_names

NEEDS_A_GPU_PACKAGE = ("rlhf.training.backends.logit_kernels", "rlhf.inference.vllm.worker")


@pytest.mark.parametrize(("old", "new"), sorted(new_names().items()))
def test_old_name_is_new_name(old: str, new: str) -> None:
    module, _, name = new.partition(":")
    assert importlib.util.find_spec(module) is not None
    if module in NEEDS_A_GPU_PACKAGE:
        return
    found = importlib.import_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = importlib.import_module(old.partition(":")[0])
    if name:
        assert getattr(before, old.partition(":")[2]) is getattr(found, name)
    else:
        public = [n for n in vars(found) if not n.startswith("_")]
        assert all(getattr(before, n) is getattr(found, n) for n in public)


def test_old_import_warns_in_a_program_of_a_stranger() -> None:
    program = (
        "from environments.bandit import Bandit; from rlhf.rollout.collect import Collector; print(Bandit.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "environments.contrib.bandit"
    assert "environments.bandit is now environments.contrib.bandit" in done.stderr
    assert "rlhf.rollout.collect is now rlhf.rollout.runner" in done.stderr


def test_unknown_names_stay_unknown() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"environments\.nothing"):
        importlib.import_module("environments.nothing")
    with pytest.raises(ImportError, match="Nothing"):
        exec("from environments.bandit import Nothing")
