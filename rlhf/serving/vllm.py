"""From a recipe to a running vLLM server."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rlhf.build.engine import save_merged, start_options
from rlhf.build.train import policy_of
from rlhf.child_process import end_with_parent, is_healthy, kill_group
from rlhf.errors import EngineError, RecipeError
from rlhf.inference.adapter_files import FOLDER
from rlhf.inference.role_adapters import adapter_names
from rlhf.inference.settings import VllmSettings
from rlhf.inference.transfer import memory_folder
from rlhf.inference.vllm.start import missing_vllm, server_arguments, server_environment, start_error
from rlhf.recipe import Recipe
from rlhf.terminal import CleanConsole
from rlhf.training.policy.model import Policy

#: Most seconds until a server answers.
START_TIMEOUT_S = 600.0

#: Seconds that a server has to stop.
_STOP_S = 20.0


def serve(recipe: Recipe, *, checkpoint: Path | None, host: str, port: int, console: CleanConsole) -> None:
    """Serve the policy until stopped.

    Raises:
        EngineError: the port is in use, or the server did not start.
        ModelError: vLLM cannot run the model.
    """
    if find_spec("vllm") is None:
        raise missing_vllm(ImportError("No module named 'vllm'", name="vllm"))
    settings = recipe.engine if isinstance(recipe.engine, VllmSettings) else VllmSettings()
    if settings.servers:
        raise RecipeError(
            "this recipe uses running servers",
            where="engine.servers",
            got=", ".join(settings.servers),
            hint="serve with engine.servers=[]",
        )
    refuse_used_port(host, port)
    policy = policy_of(recipe, checkpoint)
    try:
        with _model_folder() as folder:
            options = start_options(recipe, settings, policy, str(folder), is_server=True)
            _write(policy, folder, as_adapter=bool(options.lora_rank))
            name, adapters = recipe.name, []
            if options.lora_rank:  # who asks for the recipe by name gets the adapter too
                name, adapters = f"{recipe.name}-base", ["--lora-modules", *_modules(recipe.name, policy, folder)]
            del policy
            console.print("starting the server", highlight=False)
            # The CPU build, of another package name, lacks `vllm serve` itself; this module is in both.
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
            command += [*server_arguments(options, host=host, port=port, name=name), *adapters]
            url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
            handle, path = tempfile.mkstemp(prefix=f"rlhf-serve-{port}-", suffix=".log")
            log = Path(path)
            variables = server_environment(compile=options.compile) | {FOLDER: str(folder)}
            with _running(command, handle, variables) as process:
                if not _answers(url, process):
                    raise start_error(log.read_text(errors="replace"), options, log)
                console.print(
                    f"serving {recipe.name} at {url}; log {log}; Ctrl-C stops it", highlight=False, soft_wrap=True
                )
                code = process.wait()
                raise EngineError("the server ended", where=url, got=f"exit status {code}", hint=f"see {log}")
    except KeyboardInterrupt:
        console.print("stopped", highlight=False)


@contextmanager
def _model_folder() -> Iterator[Path]:
    """Context of a folder in memory that goes at its end, also by SIGTERM, which is a KeyboardInterrupt inside."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = memory_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def _write(policy: Policy, folder: Path, *, as_adapter: bool) -> None:
    """Write the policy into `folder`: base and adapter separately where adapters follow, else merged."""
    save_merged(policy, folder, merge=not as_adapter)
    if as_adapter:
        policy.model.save_pretrained(folder / "adapter")


def _modules(name: str, policy: Policy, folder: Path) -> Iterator[str]:
    """Yield vLLM's arguments for the policy's adapters: role adapters by the recipe's name and theirs."""
    for role in adapter_names(policy.model):
        yield f"{name}{role and f'-{role}'}={folder / 'adapter' / role}"


@contextmanager
def _running(command: list[str], log: int, variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Context of a process that logs to an open file; it ends with its children."""
    try:
        # A group of its own: Ctrl-C goes to this process alone, which lets the server finish in order; and whatever is
        # left of the group can be ended, for an engine process outlives a server that was killed.
        process = subprocess.Popen(
            command,
            env=os.environ | variables,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            yield process
        finally:
            try:
                process.terminate()
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                kill_group(process)
    finally:
        os.close(log)


def refuse_used_port(host: str, port: int) -> None:
    """Raise EngineError if the address is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineError(
                "the server cannot listen at this address",
                where=f"--host {host} --port {port}",
                got=error.strerror or str(error),
                hint="give a free port: --port N",
            ) from error


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Wait until the server is ready; False if it ended or took too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if is_healthy(url):
            return True
        time.sleep(0.2)
    return False
