"""What is said while an engine starts: vLLM's own lines, on a GPU and on a CPU."""

from __future__ import annotations

import time
from pathlib import Path

from rlhf.child_process import run_python
from rlhf.inference.vllm.start_log import StartLog, tailing

#: As vLLM 0.32 logs on an H100, shortened.
GPU = """\
INFO 11-22 10:00:01 [gpu_model_runner.py:5040] Starting to load model /tmp/0.6b...
INFO 11-22 10:00:02 [default_loader.py:502] Loading weights took 0.41 seconds
INFO 11-22 10:00:02 [gpu_model_runner.py:5150] Model loading took 1.12 GiB memory and 0.823456 seconds
INFO 11-22 10:00:09 [monitor.py:34] torch.compile took 6.72 s in total
INFO 11-22 10:00:10 [gpu_worker.py:760] Available KV cache memory: 28.31 GiB
INFO 11-22 10:00:10 [kv_cache_utils.py:2328] GPU KV cache size: 265,024 tokens, 64.7x concurrency
\rCapturing CUDA graphs (mixed prefill-decode, PIECEWISE):  20%|##  | 7/35 [00:00<00:01]
INFO 11-22 10:00:13 [gpu_model_runner.py:6582] Graph capturing finished in 3 secs, took 0.61 GiB
"""


def test_each_part_of_a_start_is_told_once_and_in_order() -> None:
    told: list[str] = []
    log = StartLog(told.append)
    for end in range(0, len(GPU) + 1, 50):
        log.feed(GPU[:end])
    log.feed(GPU)
    assert told == [
        "the engine loads the weights",
        "weights loaded in 0.41 s",
        "weights loaded, 1.12 GiB in 0.823 s",
        "compiled in 6.72 s",
        "room for keys and values of 265,024 tokens",
        "the engine captures CUDA graphs",
        "graphs captured, 0.61 GiB in 3 s",
    ]


def test_a_line_is_told_while_the_start_goes_on_and_the_last_one_after_it() -> None:
    told, said = list[str](), [""]
    with tailing(lambda: said[0], told.append):
        said[0] = "Starting to load model x"
        while not told:
            time.sleep(0.01)
        said[0] += "\nCPU KV cache size: 4,096 tokens"
    assert told == ["the engine loads the weights", "room for keys and values of 4,096 tokens"]


def test_the_terminal_hears_it_though_what_this_process_writes_goes_into_the_log(tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from rlhf.inference.vllm.start import output_into
from rlhf.progress import RichProgress
from rlhf.terminal import CleanConsole
with RichProgress(CleanConsole(stderr=True)) as progress:
    with progress.apart(), output_into(Path({str(tmp_path / "log")!r})):
        os.write(2, b"of vLLM")
        progress.say("of the run")
    progress.say("later")
"""
    done = run_python(code, 120)
    assert done.stderr.split("\n")[:2] == ["of the run", "later"], done.stderr
    assert (tmp_path / "log").read_text() == "of vLLM"
