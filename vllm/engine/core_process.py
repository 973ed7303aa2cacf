# SPDX-License-Identifier: Apache-2.0
"""The engine core in its own process: `python -c "...main()"`, started by `client.CoreProcess`.

Requests come in and outputs go out over two ZMQ sockets; the loop polls for requests
between steps and sleeps in the poll when it has nothing to do. Signals that end a server
(SIGINT, SIGTERM) are the front end's to handle: it drains, then tells the core. When the
front end dies without a word, its end of the standard-input pipe closes, and the core
goes too. Whatever ends the core is sent as a finding, so that the front end prints it
once, last; the traceback goes to a file, or to stderr with VLLM_LOGGING_LEVEL=DEBUG.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import zmq

from vllm import envs
from vllm.engine import wire
from vllm.engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.errors import Diagnostic, EngineDeadError, ExitCode, VLLMError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.engine.core import EngineCore

logger = init_logger(__name__)

_HEARTBEAT_MS = 500
_LINGER_MS = 1000
# By name and text: torch is not imported here, and its CPU allocator raises RuntimeError.
_OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError")
_OUT_OF_MEMORY_TEXTS = ("DefaultCPUAllocator", "CUDA out of memory")


def main() -> NoReturn:
    """Run a core until the front end is done with it, then exit the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # A handler that does nothing, not SIG_IGN, which workers would inherit.
        signal.signal(number, lambda *_: None)
    spec: wire.LaunchSpec = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_follow_parent, args=(spec.directory,), daemon=True).start()
    context = zmq.Context()
    channel = _Channel(context, spec)
    status = ExitCode.OK
    core: EngineCore | None = None
    stage = "start-up"
    try:
        core = spec.make_core(spec.vllm_config)
        stage = "serving"
        # The model and the libraries stay for good: keep the collector from walking them.
        gc.collect()
        gc.freeze()
        channel.send(wire.READY, _ready(core))
        CoreLoop(core, channel).run()
    except BaseException as error:
        failure = describe_failure(error, stage)
        status = failure.findings[0].exit_code
        channel.send(wire.FAILURE, failure)
    if core is not None:
        _shut_down(core)
    context.destroy(linger=_LINGER_MS)
    _leave(status)


def _ready(core: EngineCore) -> wire.CoreReady:
    config = core.kv_config
    return wire.CoreReady(
        os.getpid(),
        config.block_size,
        list(config.num_blocks),
        core.scheduler.max_sequence_tokens,
    )


def _shut_down(core: EngineCore) -> None:
    try:
        core.shutdown()
    except Exception as error:  # the root cause has been told; this is only its echo
        logger.debug("shutdown: %r", error)


def _leave(status: int) -> NoReturn:
    """Exit at once, with the workers: destructors of a broken device can hang."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _follow_parent(directory: str) -> None:
    """Exit when the front end is gone; it had no chance to clean up."""
    while sys.stdin.buffer.read(1):
        pass
    # An orderly front end says SHUTDOWN first and closes the pipe last.
    shutil.rmtree(directory, ignore_errors=True)
    _leave(ExitCode.OK)


def describe_failure(error: BaseException, stage: str) -> wire.CoreFailure:
    """The finding that tells an exception; a defect of ours leaves its traceback in a file."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    debug = envs.VLLM_LOGGING_LEVEL == "DEBUG"
    if debug:
        sys.stderr.write(trace)
    if isinstance(error, VLLMError) and error.findings:
        return wire.CoreFailure(list(error.findings), type(error).__name__)
    where = f"engine core, {stage}"
    if not debug:
        with tempfile.NamedTemporaryFile(
            "w", prefix="vllm-trace-", suffix=".txt", delete=False
        ) as file:
            file.write(trace)
        where += f"; traceback in {file.name}"
    finding = _finding(error, where)
    kind = "ResourceError" if finding.exit_code is ExitCode.RESOURCE else ""
    return wire.CoreFailure([finding], kind)


def _finding(error: BaseException, where: str) -> Diagnostic:
    lines = str(error).strip().splitlines()
    subject = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if type(error).__name__ in _OUT_OF_MEMORY or any(t in subject for t in _OUT_OF_MEMORY_TEXTS):
        return Diagnostic(
            "engine-out-of-memory",
            subject,
            where=where,
            fix="a smaller --max-model-len, --max-num-seqs or KV cache leaves more room",
            exit_code=ExitCode.RESOURCE,
        )
    if isinstance(error, EngineDeadError) and lines:
        subject = lines[0]
    return Diagnostic("engine-failed", subject, where=where, exit_code=ExitCode.CRASH)


class _Channel:
    """The core's ends of the two sockets."""

    def __init__(self, context: zmq.Context[Any], spec: wire.LaunchSpec) -> None:
        self.inbox = context.socket(zmq.PULL)
        self.inbox.setsockopt(zmq.RCVHWM, 0)
        self.inbox.bind(spec.input_address)
        self._outbox = context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.SNDHWM, 0)
        self._outbox.connect(spec.output_address)

    def send(self, tag: bytes, body: Any = None) -> None:
        """Send one message; never blocks."""
        self._outbox.send_multipart((tag, wire.encode(body)))


class CoreLoop:
    """Takes messages and steps, until it is told to stop."""

    def __init__(self, core: EngineCore, channel: _Channel) -> None:
        self._core = core
        self._channel = channel
        self._stopping = False
        self._decode_request = msgspec.msgpack.Decoder(EngineCoreRequest).decode
        self._decode_ids = msgspec.msgpack.Decoder(list[str]).decode

    def run(self) -> None:
        """Serve until SHUTDOWN. Raises what the executor raises."""
        core, channel = self._core, self._channel
        while not self._stopping:
            self._take_messages(wait=not core.has_work)
            if not core.has_work:
                continue
            channel.send(wire.OUTPUTS, core.step())

    def _take_messages(self, wait: bool) -> None:
        """Handle what has arrived; with `wait`, sleep until something does."""
        inbox = self._channel.inbox
        if wait:
            self._send_stats()  # aborts change the gauges without a step
            while not inbox.poll(_HEARTBEAT_MS):
                self._core.executor.check_health()
                self._channel.send(wire.HEARTBEAT)
        while True:
            try:
                tag, body = inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(tag, body)

    def _send_stats(self) -> None:
        stats = self._core.scheduler.take_stats()
        self._channel.send(wire.OUTPUTS, EngineCoreOutputs([], stats, time.monotonic()))

    def _handle(self, tag: bytes, body: bytes) -> None:
        if tag == wire.ADD:
            self._add(body)
        elif tag == wire.ABORT:
            self._core.abort_requests(self._decode_ids(body))
        elif tag == wire.RESET_PREFIX_CACHE:
            call_id = msgspec.msgpack.decode(body)
            self._channel.send(wire.REPLY, (call_id, self._core.reset_prefix_cache()))
        elif tag == wire.SHUTDOWN:
            self._stopping = True
        else:
            logger.error("message with unknown tag %r", tag)

    def _add(self, body: bytes) -> None:
        """Queue a request; whatever is wrong with it ends it alone."""
        try:
            self._core.add_request(self._decode_request(body))
        except Exception as error:
            logger.error("a request could not be taken: %s", error)
            request_id = msgspec.msgpack.decode(body)[0]
            output = EngineCoreOutput(
                request_id,
                [],
                FinishReason.ERROR,
                stop_reason="internal-error",
                error=str(error),
            )
            self._channel.send(wire.OUTPUTS, EngineCoreOutputs([output]))
