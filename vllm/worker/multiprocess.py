# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks in processes of their own.

Every rank gets every step over a pipe and computes its share; rank 0 samples what all ranks
sample, and its result counts. A rank that ends is noticed on its sentinel while a result is
awaited, so nobody waits for a collective that cannot complete.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

from vllm.config.kv_cache import KVCacheConfig
from vllm.engine.messages import ModelRunnerOutput, SchedulerOutput
from vllm.errors import EngineDeadError, VLLMError
from vllm.worker.executor import Executor, StepHandle

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from vllm.config.vllm import VllmConfig

_JOIN_S = 3.0


class MultiprocessExecutor(Executor):
    """One process a rank, started with spawn: CUDA cannot be forked."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        world_size = vllm_config.parallel_config.world_size
        context = multiprocessing.get_context("spawn")
        address = f"tcp://127.0.0.1:{_free_port()}"
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._waiting: deque[_RemoteStep] = deque()
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_run_rank,
                    args=(vllm_config, rank, address, theirs),
                    name=f"vllm-rank-{rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            self._gather()
        except BaseException:
            self.shutdown()
            raise

    def kv_cache_memory_bytes(self) -> int:
        return min(self._call("kv_cache_memory_bytes"))

    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        self._call("initialize_kv_cache", kv_config)

    def warm_up(self) -> None:
        self._call("warm_up")

    def execute_model(self, step: SchedulerOutput) -> StepHandle:
        self._send("execute_model", step)
        handle = _RemoteStep(self)
        self._waiting.append(handle)
        return handle

    def check_health(self) -> None:
        dead = [p for p in self._processes if not p.is_alive()]
        if dead:
            raise EngineDeadError(_obituary(dead[0]))

    def shutdown(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()

    def next_result(self) -> Any:
        """The oldest step's result, of rank 0."""
        return self._gather()[0]

    def take(self, wanted: _RemoteStep) -> None:
        """Receive results in order until `wanted` has its own."""
        while wanted.output is None:
            self._waiting.popleft().output = self.next_result()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        self._send(method, *arguments)
        return self._gather()

    def _send(self, method: str, *arguments: Any) -> None:
        message = pickle.dumps((method, arguments), protocol=5)
        try:
            for pipe in self._pipes:
                pipe.send_bytes(message)
        except OSError:
            self.check_health()
            raise EngineDeadError("a worker's pipe is closed") from None

    def _gather(self) -> list[Any]:
        """One answer of each rank. Raises what a rank raised, or that it is gone."""
        answers: list[Any] = [None] * len(self._pipes)
        open_ranks = set(range(len(self._pipes)))
        while open_ranks:
            waited = [self._pipes[r] for r in open_ranks]
            sentinels = [self._processes[r].sentinel for r in open_ranks]
            ready = multiprocessing.connection.wait([*waited, *sentinels])
            for rank in list(open_ranks):
                if self._pipes[rank] in ready:
                    answers[rank] = self._receive(rank)
                    open_ranks.discard(rank)
                elif self._processes[rank].sentinel in ready:
                    raise EngineDeadError(_obituary(self._processes[rank]))
        return answers

    def _receive(self, rank: int) -> Any:
        try:
            failed, value = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join(_JOIN_S)
            raise EngineDeadError(_obituary(self._processes[rank])) from None
        if not failed:
            return value
        if isinstance(value, VLLMError):
            raise value
        summary, trace = value
        # The rank's traceback belongs into the file that the core writes.
        raise EngineDeadError(f"rank {rank}: {summary}") from RuntimeError(trace)


class _RemoteStep(StepHandle):
    """A step that all ranks compute."""

    def __init__(self, executor: MultiprocessExecutor) -> None:
        self.executor = executor
        self.output: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        self.executor.take(self)
        assert self.output is not None
        return self.output


def _obituary(process: Any) -> str:
    code = process.exitcode
    how = f"exit status {code}"
    if code is not None and code < 0:
        how = f"signal {signal.Signals(-code).name}"
    return f"worker process {process.name} (pid {process.pid}) ended with {how}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run_rank(vllm_config: VllmConfig, rank: int, address: str, pipe: Connection) -> None:
    """A rank's process: build the worker, then answer calls until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end drains and tells us
    pending: deque[Any] = deque()
    try:
        from vllm.worker.worker import Worker  # a library that cannot be loaded is told, too

        worker = Worker(vllm_config, rank, address)
        pipe.send((False, None))
        while True:
            method, arguments = pickle.loads(pipe.recv_bytes())
            result = getattr(worker, method)(*arguments)
            if method != "execute_model":
                pipe.send((False, result))
                continue
            pending.append(result)
            # The next step is launched before this one's tokens are waited for.
            while pending and not (len(pending) < 2 and pipe.poll()):
                pipe.send((False, pending.popleft().result()))
    except EOFError:
        pass
    except BaseException as error:
        _tell(pipe, error)
    os._exit(0)


def _tell(pipe: Connection, error: BaseException) -> None:
    value: Any = error
    if not isinstance(error, VLLMError):
        import traceback

        from vllm import envs

        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if envs.VLLM_LOGGING_LEVEL == "DEBUG":
            sys.stderr.write(trace)
        value = (f"{type(error).__name__}: {error}", trace)
    with contextlib.suppress(OSError):
        pipe.send((True, value))
