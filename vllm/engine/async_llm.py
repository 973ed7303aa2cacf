# SPDX-License-Identifier: Apache-2.0
"""The engine as the API server sees it: one asynchronous stream of outputs a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from vllm.engine.client import AsyncEngineClient
from vllm.engine.input_processor import InputProcessor, ProcessedRequest
from vllm.engine.messages import EngineCoreOutputs, SchedulerStats
from vllm.engine.output_processor import OutputProcessor
from vllm.errors import EngineDeadError
from vllm.logger import init_logger
from vllm.metrics.stats import IterationStats
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.wire import CoreReady
    from vllm.tokenizers import Tokenizer

logger = init_logger(__name__)

StatsListener = Callable[[SchedulerStats | None, IterationStats | None], None]


class _Stream:
    """Outputs of one request between the engine and its reader; deltas in waiting are merged."""

    def __init__(self, merge: bool) -> None:
        self._outputs: list[RequestOutput] = []
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        self._merge = merge

    def put(self, output: RequestOutput) -> None:
        if self._merge and self._outputs and _merge(self._outputs[-1], output):
            return
        self._outputs.append(output)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._ready.set()

    async def get(self) -> RequestOutput:
        """The next output. Raises what the request failed with."""
        await self._ready.wait()
        if not self._outputs:
            assert self._error is not None
            raise self._error
        output = self._outputs.pop(0)
        if not self._outputs and self._error is None:
            self._ready.clear()
        return output


def _merge(first: RequestOutput, second: RequestOutput) -> bool:
    """Append a delta to one that has not been read, if both are of the same sequence."""
    into, new = first.outputs[0], second.outputs[0]
    if len(first.outputs) != 1 or into.index != new.index or into.finish_reason is not None:
        return False
    into.text += new.text
    into.token_ids = into.token_ids + new.token_ids
    if into.logprobs is not None:
        into.logprobs = into.logprobs + (new.logprobs or [])
    into.cumulative_logprob = new.cumulative_logprob
    into.finish_reason, into.stop_reason = new.finish_reason, new.stop_reason
    first.finished = second.finished
    first.prompt_logprobs = second.prompt_logprobs
    return True


class AsyncLLM:
    """Requests in, streams of `RequestOutput` out, for one event loop.

    `launch()` starts the core's process; `await start(tokenizer)` waits until it serves.
    `on_death` is told once if the core ends unasked, after every open request has failed.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        *,
        log_stats: bool = False,
        on_death: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.vllm_config = vllm_config
        self.client = AsyncEngineClient(vllm_config, self._on_outputs, self._on_death)
        self._log_stats = log_stats
        self._tell_death = on_death
        self._streams: dict[str, _Stream] = {}
        self._input: InputProcessor | None = None
        self._output = OutputProcessor(None)
        self.on_stats: StatsListener = lambda scheduler, iteration: None

    def launch(self) -> None:
        """Start the core's process beside whatever the caller does next."""
        self.client.launch()

    async def start(self, tokenizer: Tokenizer | None) -> CoreReady:
        """Wait until the core serves. Raises what ended it otherwise."""
        self._input = InputProcessor(self.vllm_config, tokenizer)
        self._output = OutputProcessor(tokenizer, self._log_stats)
        return await self.client.start()

    @property
    def input(self) -> InputProcessor:
        """The checks that every request passes."""
        if self._input is None:
            raise EngineDeadError("the engine is still starting")
        return self._input

    @property
    def num_unfinished(self) -> int:
        """Requests under way."""
        return self._output.num_unfinished

    async def generate(self, request: ProcessedRequest) -> AsyncIterator[RequestOutput]:
        """Run a request; closing the iterator early aborts it.

        Raises `RequestError` (the request's fault), `RequestFailed` or `EngineDeadError`.
        """
        if self.client.death is not None:
            raise EngineDeadError(str(self.client.death))
        delta = request.sampling_params.output_kind is RequestOutputKind.DELTA
        self._output.add(request)
        stream = self._streams[request.request_id] = _Stream(merge=delta)
        try:
            for sequence in request.sequences:
                self.client.add_request(sequence)
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self._forget(request.request_id)

    def abort_all(self, reason: str) -> None:
        """End every open request with an error (a shutdown that cannot wait)."""
        error = EngineDeadError(reason)
        for stream in self._streams.values():
            stream.fail(error)

    async def shutdown(self) -> None:
        """End the core."""
        await self.client.shutdown()

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        sequences = self._output.remove(request_id)
        if sequences:
            with contextlib.suppress(EngineDeadError):
                self.client.abort(sequences)

    def _on_outputs(self, message: EngineCoreOutputs) -> None:
        processed = self._output.process(message)
        for output in processed.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
        for request_id, error in processed.errors:
            logger.error("request %s failed: %s", request_id, error)
            if request_id in self._streams:
                self._streams[request_id].fail(error)
        if processed.aborts:
            self.client.abort(processed.aborts)
        self.on_stats(message.stats, processed.stats)

    def _on_death(self, error: Exception) -> None:
        for stream in self._streams.values():
            stream.fail(EngineDeadError(str(error)))
        self._tell_death(error)
