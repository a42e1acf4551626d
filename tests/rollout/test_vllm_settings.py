"""Keys of the vLLM engine in a recipe: what would have no effect is refused, and `rlhf show` counts what lies where."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rlhf.cli import app
from rlhf.errors import RecipeError
from rlhf.estimate.arithmetic import arithmetic
from rlhf.inference.settings import VllmSettings
from rlhf.inference.vllm.start import StartOptions, server_arguments
from rlhf.recipe import dump, load
from tests import recipe_parts

SERVERS = "engine.servers=[http://127.0.0.1:8000, http://127.0.0.1:8001]"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return str(recipe_parts.write(tmp_path))


def memory(recipe: str, *overrides: str) -> dict[str, Any]:
    found: dict[str, Any] = arithmetic(load(recipe, list(overrides)))["memory_bytes"]
    return found


@pytest.mark.parametrize(
    "override",
    [
        "max_sessions=64",
        "max_batch_tokens=1024",
        "kv_cache_gb=1.5",
        "gpu_memory_utilization=0.9",
        "tensor_parallel=2",
        "eager=false",
        "eager=true",
        "compile=true",
        "sleep=true",
        "kv_cache_dtype=fp8",
        "quantization=fp8",
    ],
)
def test_a_key_of_the_start_has_no_effect_on_servers(recipe: str, override: str) -> None:
    alone = load(recipe, ["engine.kind=vllm", f"engine.{override}"])
    assert alone.engine != VllmSettings()
    with pytest.raises(RecipeError) as raised:
        load(recipe, ["engine.kind=vllm", SERVERS, f"engine.{override}"])
    assert raised.value.where.startswith("engine")
    said = str(raised.value)
    assert (
        f"{override.partition('=')[0]} has no effect with servers" in said and "where the servers are started" in said
    )


@pytest.mark.parametrize(
    "override",
    [
        "at_update=keep",
        "delivery=http",
        "delivery=shared_memory",
        "lora=merged",
        "dtype=bfloat16",
        "request_timeout_s=5",
        "delivery_timeout_s=5",
        "buffer_mb=1",
        "canary_tolerance=0.1",
        "max_sessions=128",  # its default, as the record of a run spells it out
    ],
)
def test_the_other_keys_mean_something_with_servers_too(recipe: str, override: str, tmp_path: Path) -> None:
    loaded = load(recipe, ["engine.kind=vllm", "policy.lora={rank: 4}", SERVERS, f"engine.{override}"])
    assert loaded.engine.servers == ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
    again = tmp_path / "again.yaml"
    again.write_text(dump(loaded))
    assert load(str(again)).engine == loaded.engine


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["engine.kind=vllm", "engine.servers=[http://a:1, http://a:1/]"], "names an address twice"),
        (["engine.kind=vllm", "engine.servers=[127.0.0.1:8000]"], "begin with http://"),
        (["engine.kind=vllm", "engine.server=http://a:1"], "servers"),  # the nearest key
        (["engine.kind=vllm", "engine.gpu_memory_utilization=1"], "less than 1"),
        (["engine.kind=vllm", "engine.eager=true", "engine.compile=true"], "compile has no effect with eager: true"),
        (["engine.kind=vllm", "engine.at_update=kill"], "abort_and_resume"),
        (["engine.kind=vllm", "engine.buffer_mb=0"], "at least 1"),
        (["engine.kind=vllm", "engine.delivery=http"], "delivery: http needs servers"),
        (["engine.kind=vllm", SERVERS, "engine.delivery=htp"], "shared_memory"),
        (["engine.kind=transformers", "engine.servers=[http://a:1]"], "servers"),
        (["engine.kind=transformers", "engine.at_update=keep"], "at_update"),
    ],
)
def test_a_mistake_is_told(recipe: str, overrides: list[str], what: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load(recipe, overrides)
    assert raised.value.where.startswith("engine") and what in str(raised.value)


@pytest.mark.parametrize(
    ("override", "is_taken"),
    [
        ("stages.1.temperature=2.5", False),
        ("stages.1.temperature=0.005", False),
        ("evaluation.temperature=0.001", False),
        ("stages.0={kind: preference, pairs: {temperature: 2.5}}", False),
        ("evaluation.temperature=0", True),
        ("stages.1.temperature=2", True),
    ],
)
def test_temperatures_that_vllm_does_not_sample_at_are_refused(recipe: str, override: str, is_taken: bool) -> None:
    load(recipe, [override])
    if is_taken:
        load(recipe, ["engine.kind=vllm", override])
        return
    with pytest.raises(RecipeError, match=r"0\.01 to 2\.0") as raised:
        load(recipe, ["engine.kind=vllm", override])
    assert raised.value.where.endswith("temperature")


def options_of(**settings: Any) -> StartOptions:
    return StartOptions("m", 1024, "float32", **{"max_sequences": 48, "max_batch_tokens": 8192, **settings})


def test_cuda_graphs_are_used_where_there_is_a_gpu_unless_the_recipe_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert options_of().arguments()["enforce_eager"] is (not torch.cuda.is_available())
    for is_gpu, eager, found in [(0, None, True), (1, None, False), (1, True, True), (0, False, False)]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=bool(is_gpu): there)
        arguments = options_of(eager=eager).arguments()
        assert arguments["enforce_eager"] is found and ("compilation_config" in arguments) is not found


@pytest.mark.parametrize(("sequences", "batch"), [(1, 8192), (48, 8192), (300, 8192), (2000, 4000), (64, 64)])
def test_a_graph_is_there_for_every_batch_of_one_token_a_request(sequences: int, batch: int) -> None:
    options = options_of(max_sequences=sequences, max_batch_tokens=batch, eager=False)
    graphs = options.arguments()["compilation_config"]
    sizes = graphs["cudagraph_capture_sizes"]
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and len(sizes) < 35
    assert min(sequences, 512) <= sizes[-1] <= min(512, max(batch, sequences))
    assert all(b <= max(a + 32, 2 * a) for a, b in pairwise(sizes))  # little is padded
    assert graphs["mode"] == 0  # no compiler
    assert "mode" not in options_of(eager=False, compile=True).arguments()["compilation_config"]
    words = server_arguments(options, host="h", port=1, name="n")
    assert json.loads(words[words.index("--compilation-config") + 1]) == graphs


def test_show_counts_what_the_engine_adds(recipe: str) -> None:
    embedded = memory(recipe)
    assert embedded["engine"] == 0
    vllm = memory(recipe, "engine.kind=vllm")
    assert vllm["engine"] == vllm["weights"]  # a second copy, in the policy's number format
    assert vllm["training_total"] == embedded["training_total"] + vllm["weights"]
    assert vllm["max_kv_cache"] == embedded["max_kv_cache"]
    halved = memory(recipe, "engine.kind=vllm", "engine.dtype=bfloat16")
    assert (halved["engine"], halved["max_kv_cache"]) == (vllm["weights"] // 2, vllm["max_kv_cache"] // 2)
    assert memory(recipe, "engine.kind=vllm", "engine.kv_cache_gb=1.5")["max_kv_cache"] == 1_500_000_000
    servers = memory(recipe, "engine.kind=vllm", SERVERS)
    assert (servers["engine"], servers["max_kv_cache"]) == (0, 0)  # they have theirs
    assert servers["training_total"] == embedded["training_total"]
    started = memory(recipe, "engine.kind=vllm", "cluster={servers: 1, rollout_workers: 1}", "asynchrony.staleness=1")
    assert (started["engine"], started["max_kv_cache"]) == (0, 0), "on Ray, in processes of their own"


def test_show_prints_a_recipe_with_vllm(recipe: str) -> None:
    shown = CliRunner().invoke(app, ["show", recipe, "engine.kind=vllm"])
    assert shown.exit_code == 0 and "kind: vllm" in shown.output and "engine's copy" in " ".join(shown.output.split())
    result = CliRunner().invoke(app, ["show", recipe, "engine.kind=vllm", SERVERS, "--json"])
    values = json.loads(result.stdout.splitlines()[-1])
    assert values["recipe"]["engine"]["servers"] == ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]
    assert values["arithmetic"]["memory_bytes"]["max_kv_cache"] == 0


def test_eight_bits_are_passed_on_and_make_the_cache_smaller(recipe: str) -> None:
    start = StartOptions("m", 64, "bfloat16", 8, 64, kv_cache_dtype="fp8", quantization="fp8").arguments()
    assert start["kv_cache_dtype"] == start["quantization"] == "fp8"
    plain = StartOptions("m", 64, "bfloat16", 8, 64).arguments()
    assert not plain.keys() & {"kv_cache_dtype", "quantization"}
    whole, eight = (memory(recipe, "engine.kind=vllm", *more) for more in ((), ("engine.kv_cache_dtype=fp8",)))
    assert eight["kv_cache"] == whole["kv_cache"] / 4  # of float32
