# SPDX-License-Identifier: Apache-2.0
"""The server with its model on a GPU: signals, deaths, clients that go away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.fixtures.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.gpu
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

from tests.entrypoints.openai.server_process import Server, running_server  # noqa: E402
from tests.entrypoints.openai.test_lifecycle import (  # noqa: E402, F401
    test_a_killed_core_fails_open_requests_and_the_server_says_why,
    test_sigterm_finishes_open_requests_and_exits_0,
)


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that the test may end; its cache is small, so that 64 long answers overflow it."""
    flags = ("--api-key", "secret", "--num-gpu-blocks-override", "300")
    share = ("--gpu-memory-utilization", "0.2")  # tests run beside each other
    with running_server(tiny_checkpoint("llama"), *flags, *share) as server:
        yield server


def wait_for(condition: Callable[[], bool]) -> None:
    """Metrics follow the engine a step or two later."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_client_that_goes_away_frees_the_cache_and_others_go_on(own_server: Server) -> None:
    url, headers = f"{own_server.url}/v1/completions", {"Authorization": "Bearer secret"}
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
    with httpx.stream(
        "POST", url, json={**body, "n": 64, "stream": True}, headers=headers, timeout=60
    ) as response:
        lines = response.iter_lines()  # httpx closes the stream with the iterator
        next(lines)
        wait_for(lambda: own_server.metric("vllm:num_requests_running") > 0)
    answer = httpx.post(url, json=body, headers=headers, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 400
    wait_for(lambda: own_server.metric("vllm:num_requests_running") == 0)
    wait_for(lambda: own_server.metric("vllm:kv_cache_usage_perc") == 0)
