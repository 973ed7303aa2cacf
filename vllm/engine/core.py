# SPDX-License-Identifier: Apache-2.0
"""The engine core: schedule, execute, update, once a step.

    requests -> Scheduler.schedule -> Executor.execute_model -> Scheduler.update_from_output

With asynchronous scheduling two steps are under way: the next one is scheduled and
launched before the result of the last one is awaited, so the device never waits for Python.
Nothing that a single request does may end the core; an exception out of the executor does.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from vllm.config.kv_cache import KVCacheConfig
from vllm.engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
)
from vllm.engine.request import Grammar, Request
from vllm.engine.scheduler import ScheduledStep, Scheduler, SchedulerLimits
from vllm.errors import RequestError
from vllm.logger import init_logger
from vllm.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

_GRAMMAR_POLL_S = 0.005
INVALID_REQUEST = "invalid-request"
"""`stop_reason` of an output that refuses a request: the client's fault, not ours."""

GrammarCompiler = Callable[[StructuredOutputsParams], Grammar]


class StepHandle(Protocol):
    """A step that has been launched."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step."""


class StepExecutor(Protocol):
    """What the loop needs of an executor (vllm.worker.executor)."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepHandle:
        """Launch a step."""

    def check_health(self) -> None:
        """Raise `EngineDeadError` if a worker is gone."""

    def shutdown(self) -> None:
        """Release devices and end workers."""


class EngineCore:
    """Runs requests to their ends, a step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        *,
        async_scheduling: bool = False,
        compile_grammar: GrammarCompiler | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._max_in_flight = 2 if async_scheduling else 1
        self._in_flight: deque[tuple[ScheduledStep, StepHandle]] = deque()
        self._refused: list[EngineCoreOutput] = []
        self._compile_grammar = compile_grammar
        self._compiler_threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._compiling: dict[str, tuple[Request, concurrent.futures.Future[Grammar]]] = {}

    @classmethod
    def create(cls, vllm_config: VllmConfig) -> EngineCore:
        """Load the model, plan and allocate the KV cache, warm up. Raises `VLLMError`."""
        from vllm.config.kv_plan import plan_kv_cache
        from vllm.worker.executor import Executor

        executor = Executor.create(vllm_config)
        try:
            kv_config = plan_kv_cache(vllm_config, executor.kv_cache_memory_bytes())
            logger.info("KV cache: %s", describe_cache(kv_config, vllm_config))
            executor.initialize_kv_cache(kv_config)
            executor.warm_up()
            return cls._over(executor, vllm_config, kv_config)
        except BaseException:
            executor.shutdown()
            raise

    @classmethod
    def _over(
        cls, executor: StepExecutor, vllm_config: VllmConfig, kv_config: KVCacheConfig
    ) -> EngineCore:
        from vllm.sampling.structured import make_grammar_compiler

        config = vllm_config.scheduler_config
        speculative = vllm_config.speculative_config
        num_drafts = (speculative.num_speculative_tokens or 0) if speculative is not None else 0
        max_num_batched_tokens = config.max_num_batched_tokens
        max_model_len = vllm_config.model_config.max_model_len
        assert max_num_batched_tokens is not None and max_model_len is not None
        limits = SchedulerLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=config.policy,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            enable_chunked_prefill=config.enable_chunked_prefill,
            num_speculative_tokens=num_drafts,
        )
        caching = vllm_config.cache_config.enable_prefix_caching
        return cls(
            Scheduler(limits, kv_config, caching),
            executor,
            # How far a speculative request advances is known only with its result.
            async_scheduling=bool(config.async_scheduling) and num_drafts == 0,
            compile_grammar=make_grammar_compiler(vllm_config),
        )

    @property
    def kv_config(self) -> KVCacheConfig:
        """Groups and block counts of the cache."""
        return self.scheduler.kv.config

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(
            self.scheduler.num_unfinished or self._in_flight or self._refused or self._compiling
        )

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request; one that cannot run gets an output with the reason instead."""
        request_id = message.request_id
        if request_id in self.scheduler.requests or request_id in self._compiling:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")
        request = Request(message, self.scheduler.limits.max_model_len)
        reason = self.scheduler.refusal(request)
        if reason is not None:
            self._refuse(request_id, reason)
        elif message.sampling_params.structured_outputs is not None:
            self._start_compiling(request, message.sampling_params.structured_outputs)
        else:
            self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests that nobody waits for; their blocks are free at once."""
        request_ids = list(request_ids)
        self.scheduler.abort_requests(request_ids)
        for request_id in request_ids:
            compiling = self._compiling.pop(request_id, None)
            if compiling is not None:
                compiling[1].cancel()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        self.scheduler.reset_prefix_cache()
        return True

    def step(self) -> EngineCoreOutputs:
        """Advance by one step; returns what it brought, possibly nothing."""
        if self._compiling:
            self._collect_grammars()
        self._launch()
        outputs, self._refused = self._refused, []
        if self._in_flight:
            step, handle = self._in_flight.popleft()
            outputs += self.scheduler.update_from_output(step, handle.result())
        elif self._compiling:
            futures = [future for _, future in self._compiling.values()]
            concurrent.futures.wait(futures, _GRAMMAR_POLL_S, concurrent.futures.FIRST_COMPLETED)
        elif self.scheduler.num_unfinished:
            raise AssertionError(
                f"{self.scheduler.num_unfinished} requests are left and none can be scheduled"
            )
        return EngineCoreOutputs(outputs, self.scheduler.take_stats(), time.monotonic())

    def shutdown(self) -> None:
        """Stop the executor; requests under way are lost."""
        self._in_flight.clear()
        if self._compiler_threads is not None:
            self._compiler_threads.shutdown(wait=False, cancel_futures=True)
        self.executor.shutdown()

    def _launch(self) -> None:
        while len(self._in_flight) < self._max_in_flight:
            step = self.scheduler.schedule()
            if step is None:
                return
            self._in_flight.append((step, self.executor.execute_model(step.output)))

    def _refuse(self, request_id: str, reason: str, code: str = INVALID_REQUEST) -> None:
        self._refused.append(
            EngineCoreOutput(request_id, [], FinishReason.ERROR, stop_reason=code, error=reason)
        )

    def _start_compiling(self, request: Request, constraint: StructuredOutputsParams) -> None:
        """Compile a grammar beside the loop: a large one takes a second."""
        if self._compile_grammar is None:
            self._refuse(request.request_id, "structured output needs a tokenizer")
            return
        if self._compiler_threads is None:
            self._compiler_threads = concurrent.futures.ThreadPoolExecutor(2, "grammar")
        future = self._compiler_threads.submit(self._compile_grammar, constraint)
        self._compiling[request.request_id] = request, future

    def _collect_grammars(self) -> None:
        for request_id, (request, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request_id]
            error = future.exception()
            if error is None:
                request.grammar = future.result()
                self.scheduler.add_request(request)
            elif isinstance(error, RequestError):
                self._refuse(request_id, error.message)
            else:
                logger.error("grammar of request %s: %r", request_id, error)
                self._refuse(request_id, f"grammar compiler: {error}", "internal-error")


def describe_cache(kv_config: KVCacheConfig, vllm_config: VllmConfig) -> str:
    """Bytes on each rank, and how many tokens the tightest group of unlimited reach holds."""
    max_model_len = vllm_config.model_config.max_model_len or 1
    full = [
        count - 1
        for group, count in zip(kv_config.groups, kv_config.num_blocks, strict=True)
        if group.window is None
    ]
    tokens = min(full or [count - 1 for count in kv_config.num_blocks]) * kv_config.block_size
    return (
        f"{kv_config.total_bytes / 2**30:.2f} GiB on each rank, {tokens:,} tokens, "
        f"{tokens / max_model_len:.1f} sequences of {max_model_len:,}"
    )
