# SPDX-License-Identifier: Apache-2.0
"""Start, signals, keys and deaths of the server, each in a process of its own."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.entrypoints.openai.server_process import Server, running_server
from tests.fixtures.tiny_models import tiny_checkpoint

LONG = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that the test may end."""
    with running_server(tiny_checkpoint("llama"), "--api-key", "secret") as server:
        yield server


KEY = {"Authorization": "Bearer secret"}


def _streaming(server: Server, **fields: object) -> httpx.Response:
    body = {**LONG, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=KEY, timeout=60)


def _wait_running(server: Server) -> None:
    deadline = time.monotonic() + 20
    while server.metric("vllm:num_requests_running") == 0 and time.monotonic() < deadline:
        time.sleep(0.02)


def test_sigterm_finishes_open_requests_and_exits_0(own_server: Server) -> None:
    url = f"{own_server.url}/v1/completions"
    assert httpx.post(url, json=LONG).status_code == 401
    assert httpx.post(url, json=LONG, headers={"Authorization": "Bearer no"}).status_code == 401
    assert httpx.get(f"{own_server.url}/health").status_code == 200
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        whole = pool.submit(_streaming, own_server)
        streamed = pool.submit(_streaming, own_server, stream=True)
        _wait_running(own_server)
        own_server.signal(signal.SIGTERM)
        assert whole.result().json()["usage"]["completion_tokens"] == 400
        assert streamed.result().text.rstrip().endswith("[DONE]")
    assert own_server.process.wait(10) == 0
    assert own_server.survivors() == []
    assert "Traceback" not in own_server.text()


def test_a_second_signal_ends_open_requests_at_once(own_server: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        request = pool.submit(_streaming, own_server, n=64, temperature=1.0)
        _wait_running(own_server)
        own_server.signal(signal.SIGINT)
        time.sleep(0.3)
        started = time.monotonic()
        own_server.signal(signal.SIGINT)
        assert own_server.process.wait(10) == 0
        assert time.monotonic() - started < 5
        assert request.result().status_code == 503
    assert own_server.survivors() == []


def test_a_killed_core_fails_open_requests_and_the_server_says_why(own_server: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        whole = pool.submit(_streaming, own_server, n=64, temperature=1.0)
        streamed = pool.submit(_streaming, own_server, n=64, temperature=1.0, stream=True)
        _wait_running(own_server)
        time.sleep(0.5)
        started = time.monotonic()
        os.kill(own_server.core_pid(), signal.SIGKILL)
        assert own_server.process.wait(10) == 1
        assert time.monotonic() - started < 5
        answer = whole.result()
        assert answer.status_code == 503
        assert "killed by SIGKILL" in answer.json()["error"]["message"]
        assert "killed by SIGKILL" in streamed.result().text
    assert own_server.survivors() == []
    text = own_server.text()
    assert text.count("error[engine-died]") == 1
    assert "Traceback" not in text
    assert text[text.index("error[engine-died]") :].count("\n") <= 5


def test_a_signal_while_the_model_loads_ends_with_0() -> None:
    server = Server(str(tiny_checkpoint("llama")))
    try:
        deadline = time.monotonic() + 30
        while "Resolved architecture" not in server.text() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(1.0)
        server.signal(signal.SIGTERM)
        assert server.process.wait(15) == 0, server.text()
        assert server.survivors() == []
    finally:
        server.close()


def test_health_is_503_until_the_core_is_warm(tmp_path: Path) -> None:
    server = Server(str(tiny_checkpoint("llama")))
    seen: list[int] = []
    try:
        deadline = time.monotonic() + 60
        while (not seen or seen[-1] != 200) and time.monotonic() < deadline:
            try:
                seen.append(httpx.get(f"{server.url}/health", timeout=30).status_code)
            except httpx.HTTPError:
                time.sleep(0.05)
        assert seen[-1] == 200
        assert set(seen) <= {503, 200}
        answer = httpx.post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 1})
        assert answer.status_code == 200
    finally:
        server.close()


def test_a_model_that_cannot_load_ends_the_server_with_its_reason() -> None:
    server = Server(str(tiny_checkpoint("llama")), "--kv-cache-memory-bytes", "4096")
    try:
        assert server.process.wait(60) not in (0, None)
        text = server.text()
        assert "Traceback" not in text
        assert text.count("error[") == 1, text
        assert server.survivors() == []
    finally:
        server.close()
