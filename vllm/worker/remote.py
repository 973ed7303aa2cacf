# SPDX-License-Identifier: Apache-2.0
"""Ranks at the other ends of connections, whatever started them.

Every rank gets every step and computes its share; rank 0 samples what all ranks sample, and
its result counts. A rank that ends closes its connection, which is noticed while a result is
awaited, so nobody waits for a collective that cannot complete.
"""

from __future__ import annotations

import abc
import contextlib
import multiprocessing.connection
import os
import pickle
import socket
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

from vllm import envs
from vllm.config.kv_cache import KVCacheConfig
from vllm.engine.messages import ModelRunnerOutput, SchedulerOutput
from vllm.errors import EngineDeadError, VLLMError
from vllm.worker.executor import Executor, StepHandle

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from vllm.config.vllm import VllmConfig

_PULSE_S = 1.0
"""How often ranks that stay silent are asked for: a host that lost its power closes nothing."""
_GRACE_S = 0.3
"""After a rank's error: whether another rank's end, the likely cause of it, becomes known."""
_MAX_PORTS = 256
_FAILED, _DONE = True, False


class RemoteExecutor(Executor):
    """Calls the ranks at the ends of `_pipes`; a subclass starts them and knows how they end."""

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        """In the order of ranks."""
        self._waiting: deque[_RemoteStep] = deque()

    @abc.abstractmethod
    def _has_ended(self, rank: int) -> bool:
        """Whether a rank serves no more. Does not wait."""

    @abc.abstractmethod
    def _obituary(self, rank: int) -> str:
        """Which rank ended where and how; its connection is closed, or `_has_ended`."""

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
        for rank in range(len(self._pipes)):
            if self._has_ended(rank):
                self._raise_end(rank)

    def take(self, wanted: _RemoteStep) -> None:
        """Receive results in order until `wanted` has its own, of rank 0."""
        while wanted.output is None:
            self._waiting.popleft().output = self._gather()[0]

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        self._send(method, *arguments)
        return self._gather()

    def _send(self, method: str, *arguments: Any) -> None:
        message = pickle.dumps((method, arguments), protocol=5)
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError:
                self._raise_end(rank)

    def _gather(self) -> list[Any]:
        """One answer of each rank. Raises what a rank raised, or that it is gone.

        A rank's own errors that no user caused wait for `_GRACE_S`: where a rank dies, the
        others' collectives fail, and their complaints can be here first.
        """
        answers: list[Any] = [None] * len(self._pipes)
        open_ranks = set(range(len(self._pipes)))
        failure: tuple[int, Any] | None = None
        while open_ranks:
            pipes = [self._pipes[rank] for rank in open_ranks]
            ready = multiprocessing.connection.wait(pipes, _GRACE_S if failure else _PULSE_S)
            if not ready and failure:
                break
            if not ready:
                self.check_health()
            for rank in [r for r in sorted(open_ranks) if self._pipes[r] in ready]:
                open_ranks.discard(rank)
                failed, answers[rank] = self._receive(rank)
                if failed and failure is None:
                    failure = rank, answers[rank]
        if failure:
            _raise_failure(*failure)
        return answers

    def _receive(self, rank: int) -> tuple[bool, Any]:
        """Whether a rank failed, and its answer or what it says of the failure."""
        try:
            failed, value = self._pipes[rank].recv()
        except (EOFError, OSError):
            raise EngineDeadError(self._obituary(rank)) from None
        if isinstance(value, VLLMError):
            raise value
        return failed, value

    def _raise_end(self, rank: int) -> NoReturn:
        """Raise what a rank that is gone has still told, else how it ended."""
        while self._pipes[rank].poll():
            failed, value = self._receive(rank)
            if failed:
                _raise_failure(rank, value)
        raise EngineDeadError(self._obituary(rank))


def _raise_failure(rank: int, told: tuple[str, str]) -> NoReturn:
    summary, trace = told
    # The rank's traceback belongs into the file that the core writes.
    raise EngineDeadError(f"rank {rank}: {summary}") from RuntimeError(trace)


class _RemoteStep(StepHandle):
    """A step that all ranks compute."""

    def __init__(self, executor: RemoteExecutor) -> None:
        self.executor = executor
        self.output: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        self.executor.take(self)
        assert self.output is not None
        return self.output


def family_of(host: str) -> str:
    """The name of a numeric address's family, as multiprocessing.connection takes it."""
    return "AF_INET6" if ":" in host else "AF_INET"


def send_at_once(pipe: Connection) -> None:
    """Do not hold a small message back until the one before it is acknowledged (Nagle)."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as view:
        view.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def free_port(host: str) -> int:
    """A TCP port that can be bound on `host`: the first from VLLM_PORT on, else any."""
    first = envs.VLLM_PORT
    for port in [0] if first is None else range(first, first + _MAX_PORTS):
        with (
            socket.socket(getattr(socket, family_of(host))) as probe,
            contextlib.suppress(OSError),
        ):
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise OSError(f"no port can be bound on {host} (VLLM_PORT={first})")


def meeting_point(host: str) -> str:
    """Where torch.distributed's ranks meet: tcp://host:port, the port free at this moment."""
    return f"tcp://[{host}]:{free_port(host)}" if ":" in host else f"tcp://{host}:{free_port(host)}"


def serve_rank(
    vllm_config: VllmConfig,
    rank: int,
    address: str,
    pipe: Connection,
    device_index: int | None = None,
) -> None:
    """A rank's process: build the worker, then answer calls until the pipe closes.

    An error ends it; it is told through the pipe, never raised.
    """
    pending: deque[Any] = deque()
    try:
        from vllm.worker.worker import Worker  # a library that cannot be loaded is told, too

        worker = Worker(vllm_config, rank, address, device_index)
        pipe.send((_DONE, None))
        while (call := _next_call(pipe)) is not None:
            method, arguments = call
            result = getattr(worker, method)(*arguments)
            if method != "execute_model":
                pipe.send((_DONE, result))
                continue
            pending.append(result)
            # The next step is launched before this one's tokens are waited for.
            while pending and not (len(pending) < 2 and pipe.poll()):
                pipe.send((_DONE, pending.popleft().result()))
    except BaseException as error:
        _tell(pipe, error)


def _next_call(pipe: Connection) -> tuple[str, tuple[Any, ...]] | None:
    """Method and arguments; None when the other end is closed."""
    try:
        message = pipe.recv_bytes()
    except (EOFError, ConnectionError):
        return None
    call: tuple[str, tuple[Any, ...]] = pickle.loads(message)
    return call


def _tell(pipe: Connection, error: BaseException) -> None:
    value: Any = error
    if not isinstance(error, VLLMError):
        import traceback

        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if envs.VLLM_LOGGING_LEVEL == "DEBUG":
            sys.stderr.write(trace)
        value = (f"{type(error).__name__}: {error}", trace)
    with contextlib.suppress(OSError):
        pipe.send((_FAILED, value))
