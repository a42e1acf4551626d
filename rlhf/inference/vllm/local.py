"""The vLLM instance that this process starts for itself.

It is vLLM's asynchronous engine: the scheduler and the model live in a process of their own, so that the trainer's
random numbers, threads and process groups stay as they are; requests go over a local socket.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from rlhf.data import Finish, SamplingParams
from rlhf.errors import EngineError
from rlhf.inference.transfer import Slice
from rlhf.inference.vllm.instance import (
    Adapter,
    InstanceDownError,
    PauseMode,
    Sampled,
    finish_of,
    sampling_options,
    update_rows,
)
from rlhf.inference.vllm.process import detached, without_main
from rlhf.inference.vllm.start import (
    StartOptions,
    engine_environment,
    environment,
    missing_vllm,
    output_into,
    start_error,
)
from rlhf.inference.vllm.start_log import tailing


class LocalInstance:
    """vLLM's asynchronous engine, started by this process and stopped with it."""

    name = "vllm"

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @classmethod
    def start(
        cls, options: StartOptions, log: Path | None = None, tell: Callable[[str], None] | None = None
    ) -> LocalInstance:
        """Start; takes from two seconds to a minute.

        Args:
            options: how.
            log: file that gets everything vLLM has to say; without it that is dropped.
            tell: gets a line for each part of the start, from another thread.

        Raises:
            MissingPackageError: vLLM is not installed.
            ModelError: vLLM cannot run the model.
            EngineError: it could not be started for another reason.
        """
        with (
            detached() as variables,
            environment(engine_environment(compile=options.compile) | variables),
            output_into(log) as said,
            tailing(said, tell),
            without_main(),
        ):
            try:
                from vllm.config.weight_transfer import WeightTransferConfig
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.v1.engine.async_llm import AsyncLLM
            except ImportError as error:
                raise missing_vllm(error) from error
            # An earlier start has left this process quiet.
            logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
            arguments = options.arguments()
            arguments["weight_transfer_config"] = WeightTransferConfig(**arguments["weight_transfer_config"])
            try:
                return cls(AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)))
            except Exception as error:  # vLLM raises whatever its parts raise; the reason is in what it said
                raise start_error(f"{error}\n{said()}", options, log) from error
            finally:  # its other processes go on writing to the log; this one would write to the terminal
                logging.getLogger("vllm").setLevel(logging.ERROR)

    async def sample(
        self,
        request_id: str,
        ids: Sequence[int],
        params: SamplingParams,
        stop_ids: Sequence[int],
        adapter: Adapter | None,
    ) -> Sampled:
        """Sample once."""
        new_params, new_input, final_only = _vllm_types()
        options = new_params(**sampling_options(params, stop_ids), output_kind=final_only)
        last: Any = None
        with self._faults("generate"):
            outputs: AsyncIterator[Any] = self._engine.generate(
                new_input(list(ids)), options, request_id, lora_request=_lora_request(adapter)
            )
            async for output in outputs:
                last = output
        if last is None:  # ended before anything was sampled
            return Sampled((), (), Finish.ABORT, ())
        one = last.outputs[0]
        token_ids = tuple(one.token_ids)
        logprobs = tuple(
            float(found[token].logprob) for found, token in zip(one.logprobs or (), token_ids, strict=True)
        )
        spans = tuple((s.version, s.end - s.start) for s in one.weight_versions or ())
        return Sampled(token_ids, logprobs, finish_of(one.finish_reason), spans)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Let requests end at once, with what they have."""
        with self._faults("abort"):
            await self._engine.abort(list(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """Schedule nothing more."""
        with self._faults("pause"):
            await self._engine.pause_generation(mode=mode, clear_cache=True)

    async def resume(self) -> None:
        """Schedule again."""
        with self._faults("resume"):
            await self._engine.resume_generation()

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker."""
        with self._faults(method):
            return list(await self._engine.collective_rpc(method, args=args))

    async def connect_transfer(self, info: Mapping[str, Any]) -> None:
        """Say how weights will arrive."""
        await self.call("init_weight_transfer_engine", dict(info))

    async def start_update(self) -> None:
        """Weights are about to arrive."""
        await self.call("start_weight_update")

    async def put(self, place: int, data: bytes) -> None:
        """Take in a piece of the buffer."""
        await self.call("rlhf_put", place, data.decode())

    async def update(self, slices: Sequence[Slice], address: Mapping[str, Any]) -> None:
        """Load what lies in the buffer."""
        await self.call("update_weights", update_rows(slices, address))

    async def finish_update(self) -> None:
        """All have arrived."""
        await self.call("finish_weight_update")

    async def drop_cache(self) -> bool:
        """Forget all keys and values."""
        with self._faults("reset_prefix_cache"):
            return bool(await self._engine.reset_prefix_cache(reset_running_requests=True))

    async def set_version(self, version: str) -> None:
        """Name the weights."""
        with self._faults("update_weight_version"):
            await self._engine.update_weight_version(version)

    async def version(self) -> str:
        """Return the name of the weights."""
        with self._faults("get_weight_version"):
            return str(await self._engine.get_weight_version())

    async def add_adapter(self, adapter: Adapter) -> None:
        """Load an adapter beside those in use."""
        with self._faults("add_lora"):
            done = await self._engine.add_lora(_lora_request(adapter))
        if not done:
            raise EngineError("vLLM did not take the adapter", where=self.name, got=str(adapter.path))

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Free an adapter."""
        with self._faults("remove_lora"):
            await self._engine.remove_lora(adapter.number)

    async def sleep(self) -> None:
        """Give the GPU's memory back."""
        with self._faults("sleep"):
            await self._engine.sleep(level=1, mode="wait")

    async def wake(self) -> None:
        """Take the memory again."""
        with self._faults("wake_up"):
            await self._engine.wake_up()

    async def is_up(self) -> bool:
        """True if the engine process lives."""
        return self._engine is not None and not self._engine.errored

    async def close(self) -> None:
        """Stop the engine process."""
        engine, self._engine = self._engine, None
        if engine is not None:
            with output_into(None):
                engine.shutdown()

    @contextmanager
    def _faults(self, what: str) -> Iterator[None]:
        """Turn what vLLM raises into errors of ours."""
        try:
            yield
        except EngineError:
            raise
        except Exception as error:
            dead = type(error).__name__ == "EngineDeadError" or self._engine is None or self._engine.errored
            cause = error.__cause__ or error
            raise (InstanceDownError if dead else EngineError)(
                "the vLLM engine died" if dead else "vLLM failed",
                where=f"{self.name}: {what}",
                got=f"{type(cause).__name__}: {cause}",
            ) from error


@cache
def _vllm_types() -> tuple[Any, Any, Any]:
    """Classes of requests; vLLM looks its own names up anew whenever they are imported."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    # An input that is rendered already is sent at once; ids as a prompt would go by way of a thread.
    return SamplingParams, tokens_input, RequestOutputKind.FINAL_ONLY


def _lora_request(adapter: Adapter | None) -> Any:
    if adapter is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.name, adapter.number, str(adapter.path))
