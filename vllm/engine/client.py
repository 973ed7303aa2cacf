# SPDX-License-Identifier: Apache-2.0
"""How a front end talks to an engine core: in its own process, or in this one.

`AsyncEngineClient` is for the API server, `ProcessClient` and `InprocClient` are for `LLM()`.
All take `EngineCoreRequest`s and give `EngineCoreOutputs`. This module imports no torch; the
core does, in its process or when an `InprocClient` is made.

A core that ends unasked is noticed at once through its process handle. Its own last message
names the root cause; without one (SIGKILL) the exit status does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from vllm import envs, errors
from vllm.engine import wire
from vllm.engine.core import EngineCore
from vllm.engine.messages import EngineCoreOutputs, EngineCoreRequest
from vllm.errors import Diagnostic, EngineDeadError, ExitCode, VLLMError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

CoreFactory = Callable[["VllmConfig"], EngineCore]
"""Makes the core in its process; pickled by name, so a module-level callable."""

_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[1:]; del sys.argv[1:]; "
    "from vllm.engine.core_process import main; main()"
)
_SHUTDOWN_TIMEOUT_S = 3.0
_PIPE_TIMEOUT_S = 1.0
_LAST_WORDS_S = 0.3
_MESSAGES_PER_CALL = 4
_MAX_SOCKET_PATH = 107  # bytes in sockaddr_un.sun_path, less the terminating zero

_decode_outputs = msgspec.msgpack.Decoder(EngineCoreOutputs).decode
_decode_ready = msgspec.msgpack.Decoder(wire.CoreReady).decode
_decode_failure = msgspec.msgpack.Decoder(wire.CoreFailure).decode


def _socket_directory() -> str:
    """A new directory of ours alone, short enough for the path of a Unix socket."""
    directory = tempfile.mkdtemp(prefix="vllm-core-")
    if len(directory) + len("/output") < _MAX_SOCKET_PATH:
        return directory
    os.rmdir(directory)
    return tempfile.mkdtemp(prefix="vllm-core-", dir="/tmp")


class CoreProcess:
    """A core's process and this side of its sockets; started by the constructor."""

    def __init__(self, vllm_config: VllmConfig, make_core: CoreFactory) -> None:
        self._spec = wire.LaunchSpec(make_core, vllm_config, _socket_directory())
        self._remove_directory = weakref.finalize(
            self, shutil.rmtree, self._spec.directory, ignore_errors=True
        )
        self._context = zmq.Context()
        self.outbox = self._context.socket(zmq.PUSH)
        self.outbox.setsockopt(zmq.SNDHWM, 0)
        # Connected, not bound: it then queues what is sent before the core listens.
        self.outbox.connect(self._spec.input_address)
        self.inbox = self._context.socket(zmq.PULL)
        self.inbox.setsockopt(zmq.RCVHWM, 0)
        self.inbox.bind(self._spec.output_address)
        self.failure: wire.CoreFailure | None = None
        self.ready: wire.CoreReady | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, *sys.path], stdin=subprocess.PIPE
        )
        # A child that died at once shows in its exit status, not as a broken pipe here.
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin is not None
            pickle.dump(self._spec, self.process.stdin)
            self.process.stdin.flush()

    def send(self, tag: bytes, body: Any = None) -> None:
        """Send one message; never blocks."""
        self.outbox.send_multipart((tag, wire.encode(body)), zmq.NOBLOCK)

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next message, or None if none has arrived. Remembers READY and FAILURE."""
        try:
            tag, body = self.inbox.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if tag == wire.FAILURE:
            self.failure = _decode_failure(body)
        elif tag == wire.READY:
            self.ready = _decode_ready(body)
        return tag, body

    def findings(self) -> list[Diagnostic]:
        """Why the process ended: what it said itself, or what its exit status says."""
        if self.failure is not None:
            return self.failure.findings
        status = self.process.poll()
        if status is None:
            subject, why = "the engine core does not answer", ""
        elif status < 0:
            name = signal.Signals(-status).name
            subject, sigkill = f"the engine core was killed by {name}", name == "SIGKILL"
            why = (
                "the kernel does so when memory runs out, or another process did" if sigkill else ""
            )
        else:
            subject, why = f"the engine core exited with status {status}", ""
        return [
            Diagnostic(
                "engine-died",
                subject,
                why=why,
                where=f"process {self.process.pid}",
                exit_code=ExitCode.CRASH,
            )
        ]

    def error(self) -> Exception:
        """The exception that tells why the process ended."""
        findings = self.findings()
        kind = getattr(errors, self.failure.exception, None) if self.failure else None
        if isinstance(kind, type) and issubclass(kind, VLLMError):
            return kind(*findings) if kind is not errors.RequestError else VLLMError(*findings)
        return EngineDeadError("\n".join(str(f) for f in findings))

    def _wait(self, timeout_s: float) -> bool:
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """End the process, politely, then by force; remove the sockets. Safe to repeat."""
        if self.process.poll() is None:
            self.send(wire.SHUTDOWN)
            self._wait(_SHUTDOWN_TIMEOUT_S if self.ready else 0.0)
        if self.process.stdin is not None:
            # The core exits at the end of this pipe, wherever it is.
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        if not self._wait(_PIPE_TIMEOUT_S):
            self.process.kill()
            self.process.wait()
        if not self._context.closed:
            self._context.destroy(linger=0)
        self._remove_directory()


class AsyncEngineClient:
    """A core in its own process, for one event loop.

    `launch` starts the process and returns at once; `await start()` waits until it serves.
    `on_outputs` is called on the loop with each message of outputs, `on_death` once if the
    core ends unasked, with an `EngineDeadError` or the `VLLMError` that the core named.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_death: Callable[[Exception], None],
        make_core: CoreFactory = EngineCore.create,
    ) -> None:
        self._make_core = make_core
        self._vllm_config = vllm_config
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._core: CoreProcess | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[wire.CoreReady] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._closing = False
        self._last_message = time.monotonic()
        self.death: Exception | None = None
        """Why the core ended unasked, or None."""

    def launch(self) -> None:
        """Start the core's process, so that its imports run beside the caller's."""
        if self._core is None:
            self._core = CoreProcess(self._vllm_config, self._make_core)

    async def start(self) -> wire.CoreReady:
        """Wait until the core serves. Raises what ended it otherwise."""
        self.launch()
        core = self._process
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._loop.add_reader(core.inbox.fileno(), self._drain)
        threading.Thread(target=self._watch, name="core-watch", daemon=True).start()
        self._loop.call_soon(self._drain)  # what came before the reader was there
        try:
            return await self._ready
        except BaseException:
            await self.shutdown()
            raise

    @property
    def _process(self) -> CoreProcess:
        if self._core is None:
            raise RuntimeError("the engine client was not started")
        return self._core

    @property
    def is_alive(self) -> bool:
        """Whether the core's process runs and serves."""
        ready = self._core is not None and self._core.ready is not None
        return ready and self.death is None and not self._closing

    def unhealthy_reason(self) -> str | None:
        """Why /health should not be 200, or None. A core without work sends heartbeats."""
        if self.death is not None:
            return str(self.death)
        if not self.is_alive:
            return "the engine core is not ready"
        silence = time.monotonic() - self._last_message
        if silence > envs.VLLM_ENGINE_ITERATION_TIMEOUT_S:
            return f"no sign of life from the engine core for {silence:.0f} s"
        return None

    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request to the core. Raises `EngineDeadError` if it is gone."""
        self._send(wire.ADD, request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests that nobody waits for; nothing more is heard of them."""
        if self.death is None:
            self._send(wire.ABORT, list(request_ids))

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        assert self._loop is not None
        call_id = next(self._call_ids)
        future = self._calls[call_id] = self._loop.create_future()
        self._send(wire.RESET_PREFIX_CACHE, call_id)
        return await future

    async def shutdown(self) -> None:
        """End the core and remove its sockets; requests under way are lost."""
        self._closing = True
        self._fail_calls(EngineDeadError("the engine is shutting down"))
        if self._core is None:
            return
        if self._loop is not None and not self._core.inbox.closed:
            self._loop.remove_reader(self._core.inbox.fileno())
        await asyncio.get_running_loop().run_in_executor(None, self._core.close)

    def _send(self, tag: bytes, body: Any) -> None:
        if self.death is not None:
            raise EngineDeadError(str(self.death))
        self._process.send(tag, body)

    def _drain(self) -> None:
        """Handle messages that are there, a few at a time so that the loop's others get on.

        The descriptor signals only new messages: what is left needs another call.
        """
        core, loop = self._process, self._loop
        assert loop is not None
        for _ in range(_MESSAGES_PER_CALL):
            message = None if core.inbox.closed else core.receive()
            if message is None:
                return
            self._last_message = time.monotonic()
            try:
                self._handle(*message)
            except Exception:
                logger.exception("a message of the engine core could not be handled")
        loop.call_soon(self._drain)

    def _handle(self, tag: bytes, body: bytes) -> None:
        if tag == wire.OUTPUTS:
            self._on_outputs(_decode_outputs(body))
        elif tag == wire.READY and self._ready is not None and not self._ready.done():
            assert self._process.ready is not None
            self._ready.set_result(self._process.ready)
        elif tag == wire.REPLY:
            call_id, result = msgspec.msgpack.decode(body)
            future = self._calls.pop(call_id, None)
            if future is not None and not future.done():
                future.set_result(result)

    def _watch(self) -> None:
        """In a thread: wait for the process and tell the loop."""
        self._process.process.wait()
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._exited)

    def _exited(self) -> None:
        core = self._process
        if self._closing or core.inbox.closed:
            return
        deadline = time.monotonic() + _LAST_WORDS_S
        while core.failure is None and core.inbox.poll(_milliseconds_until(deadline)):
            self._drain()
        self.death = core.error()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(self.death)
            return
        self._fail_calls(self.death)
        self._on_death(self.death)

    def _fail_calls(self, error: Exception) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()


def _milliseconds_until(deadline: float) -> int:
    return max(0, int(1000 * (deadline - time.monotonic())))


class EngineClient(Protocol):
    """What `LLM()` needs of a core."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests."""

    def step(self) -> EngineCoreOutputs:
        """Wait for the next outputs; only while requests are unfinished."""

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""

    def shutdown(self) -> None:
        """End the core."""


class InprocClient:
    """A core in this process, stepped by the caller."""

    def __init__(self, vllm_config: VllmConfig, make_core: CoreFactory = EngineCore.create) -> None:
        self._core = make_core(vllm_config)
        self._death: EngineDeadError | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the core can still step."""
        return self._death is None

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; one that cannot run gets an output with the reason."""
        self._check()
        self._core.add_request(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; nothing more is heard of them."""
        self._core.abort_requests(request_ids)

    def step(self) -> EngineCoreOutputs:
        """Run one step. Raises `EngineDeadError` if the executor fails, and ever after."""
        self._check()
        try:
            return self._core.step()
        except Exception as error:
            self._death = EngineDeadError(f"{type(error).__name__}: {error}")
            raise self._death from error

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        return self._core.reset_prefix_cache()

    def shutdown(self) -> None:
        """Stop the executor."""
        self._core.shutdown()

    def _check(self) -> None:
        if self._death is not None:
            raise self._death


class ProcessClient:
    """A core in its own process with the verbs of `InprocClient`; the constructor waits."""

    def __init__(self, vllm_config: VllmConfig, make_core: CoreFactory = EngineCore.create) -> None:
        self._core = CoreProcess(vllm_config, make_core)
        self._call_ids = itertools.count()
        self._outputs: list[EngineCoreOutputs] = []
        try:
            self._wait_for(wire.READY)
        except BaseException:
            self._core.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the core's process runs."""
        return self._core.process.poll() is None

    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request to the core."""
        self._core.send(wire.ADD, request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; nothing more is heard of them."""
        self._core.send(wire.ABORT, list(request_ids))

    def step(self) -> EngineCoreOutputs:
        """Wait for the next outputs. Raises `EngineDeadError` if the core ends."""
        if self._outputs:
            return self._outputs.pop(0)
        return _decode_outputs(self._wait_for(wire.OUTPUTS))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        self._core.send(wire.RESET_PREFIX_CACHE, next(self._call_ids))
        return msgspec.msgpack.decode(self._wait_for(wire.REPLY))[1]

    def shutdown(self) -> None:
        """End the process and remove its sockets."""
        self._core.close()

    def _wait_for(self, wanted: bytes) -> bytes:
        """Body of the next message of one kind; outputs that come before it are kept."""
        core = self._core
        while True:
            dead = not self.is_alive
            message = core.receive()
            if message is None:
                if dead:
                    raise core.error()
                core.inbox.poll(100)
            elif message[0] == wanted:
                return message[1]
            elif message[0] == wire.OUTPUTS:
                self._outputs.append(_decode_outputs(message[1]))


def make_engine_client(vllm_config: VllmConfig) -> EngineClient:
    """The core for `LLM()`: in this process unless VLLM_ENABLE_V1_MULTIPROCESSING is set."""
    if envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return ProcessClient(vllm_config)
    return InprocClient(vllm_config)


__all__ = [
    "AsyncEngineClient",
    "CoreProcess",
    "EngineClient",
    "InprocClient",
    "ProcessClient",
    "make_engine_client",
]
