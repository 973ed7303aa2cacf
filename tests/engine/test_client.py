# SPDX-License-Identifier: Apache-2.0
"""Cores in real processes behind real sockets: life, failure and death."""

from __future__ import annotations

import asyncio
import glob
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine import process_cores as cores
from tests.engine.paged_oracle import expected_tokens, make_request
from vllm.engine.client import AsyncEngineClient, InprocClient, ProcessClient
from vllm.engine.core_process import describe_failure
from vllm.engine.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.errors import ConfigError, EngineDeadError, ExitCode

PROMPT = list(range(1, 20))


@pytest.fixture(autouse=True)
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sockets and traces go to the test's directory, which must be clean of sockets at the end."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield tmp_path
    assert glob.glob(f"{tmp_path}/vllm-core-*") == []


class Front:
    """What a server keeps of its requests."""

    def __init__(self, options: dict[str, Any] | None = None, make_core=cores.make_core) -> None:
        self.outputs: list[EngineCoreOutput] = []
        self.stats = None
        self.death: Exception | None = None
        self.changed = asyncio.Event()
        self.client = AsyncEngineClient(options or {}, self.take, self.die, make_core)

    def take(self, outputs: EngineCoreOutputs) -> None:
        self.outputs += outputs.outputs
        self.stats = outputs.stats or self.stats
        self.changed.set()

    def die(self, error: Exception) -> None:
        assert self.death is None
        self.death = error
        self.changed.set()

    async def until(self, condition, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), deadline - time.monotonic())

    def finished(self, request_id: str) -> bool:
        return any(o.request_id == request_id and o.finish_reason is not None for o in self.outputs)

    def tokens(self, request_id: str) -> list[int]:
        return [t for o in self.outputs if o.request_id == request_id for t in o.new_token_ids]


def endless(request_id: str):
    return make_request(request_id, PROMPT, max_tokens=None, ignore_eos=True)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_requests_through_a_core_process_get_their_tokens():
    async def scenario() -> None:
        front = Front()
        front.client.launch()
        ready = await front.client.start()
        assert ready.num_blocks == [40, 40] and ready.block_size == 8
        assert front.client.is_alive and front.client.unhealthy_reason() is None
        requests = [make_request(f"r{i}", PROMPT[i:], max_tokens=20) for i in range(6)]
        for request in requests:
            front.client.add_request(request)
        await front.until(lambda: all(front.finished(r.request_id) for r in requests))
        for request in requests:
            want = expected_tokens(
                request.prompt_token_ids, request.sampling_params, cores.GROUPS, 64
            )
            assert front.tokens(request.request_id) == want
        assert await front.client.reset_prefix_cache() is True
        await front.client.shutdown()
        assert not front.client.is_alive and front.death is None
        assert not alive(ready.pid)

    asyncio.run(scenario())


def test_an_aborted_request_frees_its_blocks_and_is_not_heard_of_again():
    async def scenario() -> None:
        front = Front({"step_s": 0.02})
        await front.client.start()
        front.client.add_request(endless("r"))
        await front.until(lambda: len(front.tokens("r")) >= 2)
        assert front.stats.num_running == 1 and front.stats.kv_cache_usage > 0
        front.client.abort(["r", "unknown"])
        await front.until(lambda: front.stats.num_running == 0)
        assert front.stats.kv_cache_usage == 0
        count = len(front.outputs)
        front.client.add_request(make_request("s", PROMPT, max_tokens=1))
        await front.until(lambda: front.finished("s"))
        assert len(front.outputs) == count + 1
        await front.client.shutdown()

    asyncio.run(scenario())


def test_a_request_that_fails_ends_alone():
    async def scenario() -> None:
        front = Front()
        await front.client.start()
        too_long = make_request("long", [1] * 64)
        for request in (
            make_request("nan", PROMPT),
            too_long,
            make_request("good", PROMPT),
        ):
            front.client.add_request(request)
        await front.until(lambda: all(front.finished(i) for i in ("nan", "long", "good")))
        last = {o.request_id: o for o in front.outputs}
        assert last["nan"].finish_reason is FinishReason.ERROR
        assert last["nan"].error == "logits are not finite"
        assert last["long"].stop_reason == "invalid-request"
        assert "64 tokens" in last["long"].error
        assert last["good"].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        await front.client.shutdown()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "RuntimeError: device fell off the bus"),
        ("SIGKILL", "killed by SIGKILL"),
        ("SIGSEGV", "killed by SIGSEGV"),
    ],
)
def test_a_core_that_dies_is_noticed_within_a_second_with_its_cause(how, cause, sockets, capfd):
    async def scenario() -> None:
        front = Front({"how": how, "at": 5, "step_s": 0.01})
        ready = await front.client.start()
        front.client.add_request(endless("r"))
        await front.until(lambda: front.tokens("r"))
        start = time.monotonic()
        await front.until(lambda: front.death is not None)
        assert time.monotonic() - start < 1.5
        assert isinstance(front.death, EngineDeadError)
        assert cause in str(front.death) and "second line" not in str(front.death)
        assert not front.client.is_alive and cause in front.client.unhealthy_reason()
        with pytest.raises(EngineDeadError, match=cause):
            front.client.add_request(endless("s"))
        assert not alive(ready.pid)
        await front.client.shutdown()

    asyncio.run(scenario())
    assert "Traceback" not in capfd.readouterr().err
    traces = list(sockets.glob("vllm-trace-*"))
    assert len(traces) == (how == "raise")
    assert all("second line" in t.read_text() for t in traces)


def test_a_worker_that_dies_while_nothing_runs_is_noticed_within_a_second():
    async def scenario() -> None:
        front = Front({"how": "lost worker"})
        await front.client.start()
        await front.until(lambda: front.death is not None, timeout_s=1.5)
        assert str(front.death).startswith("error[engine-failed]: rank 1 was killed by SIGKILL")
        await front.client.shutdown()

    asyncio.run(scenario())


def test_a_core_that_cannot_start_names_its_finding_and_exit_code(capfd):
    async def scenario() -> None:
        with pytest.raises(ConfigError) as caught:
            await Front(make_core=cores.fail_with_a_finding).client.start()
        assert caught.value.findings[0].code == "kv-cache-too-small"
        assert caught.value.exit_code is ExitCode.CONFIG

    asyncio.run(scenario())
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code", "exit_code"),
    [
        (MemoryError(), "engine-out-of-memory", ExitCode.RESOURCE),
        (
            RuntimeError("[enforce fail at alloc] DefaultCPUAllocator: can't allocate memory"),
            "engine-out-of-memory",
            ExitCode.RESOURCE,
        ),
        (RuntimeError("memory of a device"), "engine-failed", ExitCode.CRASH),
        (EngineDeadError("rank 0 is gone\nmore"), "engine-failed", ExitCode.CRASH),
    ],
    ids=["MemoryError", "torch on the CPU", "another error", "lost rank"],
)
def test_what_a_failure_of_the_core_is_called(error, code, exit_code, sockets):
    failure = describe_failure(error, "start-up")
    (finding,) = failure.findings
    assert (failure.exception == "ResourceError") == (exit_code is ExitCode.RESOURCE)
    assert (finding.code, finding.exit_code) == (code, exit_code)
    first = (str(error) or type(error).__name__).splitlines()[0]
    assert first in finding.subject and "\n" not in finding.subject
    trace = Path(finding.where.removeprefix("engine core, start-up; traceback in "))
    assert trace.parent == sockets and str(error) in trace.read_text()


@pytest.mark.parametrize(
    ("make_core", "cause"),
    [
        (cores.fail_with_a_defect, "KeyError: 'layers.3'"),
        (cores.die_while_loading, "killed by SIGKILL"),
    ],
)
def test_a_core_that_breaks_while_loading_ends_the_wait_at_once(make_core, cause, capfd):
    async def scenario() -> None:
        with pytest.raises(EngineDeadError, match=cause):
            await asyncio.wait_for(Front(make_core=make_core).client.start(), 10)

    asyncio.run(scenario())
    assert "Traceback" not in capfd.readouterr().err


def test_a_front_end_that_stumbles_over_an_output_gets_the_next_ones():
    async def scenario() -> None:
        front = Front()
        await front.client.start()
        take, stumbles = front.take, []

        def stumble(outputs: EngineCoreOutputs) -> None:
            take(outputs)
            stumbles.append(outputs)
            raise KeyError("a defect of the front end")

        front.client._on_outputs = stumble
        front.client.add_request(make_request("r", PROMPT, max_tokens=30, ignore_eos=True))
        await front.until(lambda: front.finished("r"))
        assert len(front.tokens("r")) == 30 and len(stumbles) >= 30
        await front.client.shutdown()

    asyncio.run(scenario())


def test_signals_that_end_a_server_do_not_end_its_core():
    async def scenario() -> None:
        front = Front()
        ready = await front.client.start()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(ready.pid, number)
        front.client.add_request(make_request("r", PROMPT, max_tokens=3))
        await front.until(lambda: front.finished("r"))
        await front.client.shutdown()

    asyncio.run(scenario())


def test_a_stopped_core_is_reported_as_unhealthy(monkeypatch):
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", "0.3")

    async def scenario() -> None:
        front = Front({"step_s": 0.01})
        ready = await front.client.start()
        front.client.add_request(endless("r"))
        await front.until(lambda: front.tokens("r"))
        assert front.client.unhealthy_reason() is None
        os.kill(ready.pid, signal.SIGSTOP)
        await asyncio.sleep(0.5)
        assert "no sign of life" in front.client.unhealthy_reason()
        await asyncio.wait_for(front.client.shutdown(), 6)
        assert not alive(ready.pid)

    asyncio.run(scenario())


_PARENT = """
import asyncio, sys, time
from tests.engine import process_cores as cores
from vllm.engine.client import AsyncEngineClient
async def main():
    client = AsyncEngineClient({{}}, lambda o: None, lambda e: None, cores.{make_core})
    client.launch()
    print(client._process.process.pid, flush=True)
    await client.start()
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("make_core", ["make_core", "load_for_ever"])
def test_a_core_whose_front_end_is_killed_leaves_nothing_behind(make_core):
    code = _PARENT.format(make_core=make_core)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    if make_core == "make_core":
        assert parent.stdout.readline() == "ready\n"
    else:
        time.sleep(0.5)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)


def test_sockets_live_in_tmp_where_the_temporary_directory_has_too_long_a_path(
    tmp_path, monkeypatch
):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)
    client = ProcessClient({}, cores.make_core)
    directory = client._core._spec.directory
    assert directory.startswith("/tmp/vllm-core-") and os.stat(directory).st_mode & 0o77 == 0
    client.shutdown()
    assert not os.path.exists(directory) and list(deep.iterdir()) == []


def test_the_clients_of_llm_give_the_same_tokens_in_process_and_out():
    results = []
    for client in (InprocClient({}, cores.make_core), ProcessClient({}, cores.make_core)):
        try:
            client.add_request(make_request("r", PROMPT, max_tokens=30, ignore_eos=True))
            client.add_request(endless("gone"))
            client.abort(["gone"])
            tokens: list[int] = []
            while len(tokens) < 30:
                for output in client.step().outputs:
                    # A step may come between the two messages about the other request.
                    if output.request_id == "r":
                        tokens += output.new_token_ids
                    else:
                        assert output.finish_reason is None
            assert client.reset_prefix_cache() is True
            results.append(tokens)
        finally:
            client.shutdown()
    assert results[0] == results[1]


def test_an_executor_that_raises_ends_the_clients_of_llm_with_the_cause():
    options = {"how": "raise", "at": 2}
    for client in (
        InprocClient(options, cores.make_core),
        ProcessClient(options, cores.make_core),
    ):
        client.add_request(endless("r"))
        with pytest.raises(EngineDeadError, match="fell off the bus"):
            for _ in range(5):
                client.step()
        assert not client.is_alive
        client.shutdown()
