# SPDX-License-Identifier: Apache-2.0
"""Processes that die under `vllm serve`: the root cause is told once, last, and nothing is left.

A core that is killed while it answers is in tests/entrypoints/openai/test_lifecycle.py.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.entrypoints.openai.server_process import Server
from tests.fixtures.tiny_models import tiny_checkpoint

ROOT = Path(__file__).parents[3]
SOON_S = 5.0
PROMPT = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "n": 16, "temperature": 1.0}


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the server's sockets and traces lie."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def server(*flags: str) -> Iterator[Server]:
    started = Server(str(tiny_checkpoint("llama")), *flags)
    try:
        yield started
    finally:
        started.close()


def until(condition, timeout_s: float = 60.0):
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(StopIteration, OSError):
            if value := condition():
                return value
        time.sleep(0.02)
    raise AssertionError("timed out")


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`, oldest first."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return sorted(found)


def ranks(core: int) -> list[int]:
    """The workers that a core has started, rank by rank."""
    return [p for p in children(core) if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]


def check_end(ended: Server, code: str, words: str, sockets: Path) -> None:
    """One error, at the end of what was printed; no process and no socket remains."""
    text = ended.text()
    assert re.findall(r"^error\[([\w-]+)\]", text, re.MULTILINE) == [code], text
    told = text[text.index("error[") :]
    assert words in told and len(told.splitlines()) <= 5, text
    assert "Traceback" not in text
    assert ended.survivors() == []
    assert list(sockets.glob("vllm-core-*")) == []


def test_a_killed_rank_ends_the_server_with_its_name(sockets: Path) -> None:
    with server("--tensor-parallel-size", "2", "--num-gpu-blocks-override", "512") as serving:
        serving.wait_ready()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(
                httpx.post, f"{serving.url}/v1/completions", json=PROMPT, timeout=60
            )
            until(lambda: serving.metric("vllm:num_requests_running"))
            victim = ranks(serving.core_pid())[1]
            started = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            assert serving.process.wait(SOON_S) == 1
            assert time.monotonic() - started < SOON_S
            assert answer.result().status_code == 503
            assert "vllm-rank-1" in answer.result().json()["error"]["message"]
        check_end(serving, "engine-failed", "vllm-rank-1", sockets)


def test_a_core_killed_while_it_loads_ends_the_server(sockets: Path) -> None:
    with server() as starting:
        core = until(starting.core_pid)
        os.kill(core, signal.SIGKILL)
        assert starting.process.wait(SOON_S) == 1
        check_end(starting, "engine-died", "killed by SIGKILL", sockets)


@pytest.mark.parametrize("num_ranks", ["1", "2"])
def test_a_library_that_cannot_be_loaded_is_told_once_however_many_ranks(
    sockets: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: str
) -> None:
    broken = sockets / "site" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text(
        'raise ImportError("libcudart.so.13: cannot open shared object file")\n'
    )
    # In front of the installed one, for the server and all that it starts.
    (sockets / "site" / "sitecustomize.py").write_text(
        f"import sys; sys.path.insert(0, {str(broken.parent)!r})\n"
    )
    model = str(tiny_checkpoint("llama"))  # made here, with the real one
    monkeypatch.setattr(
        "tests.entrypoints.openai.server_process.ROOT", f"{sockets / 'site'}:{ROOT}"
    )
    failing = Server(model, "--tensor-parallel-size", num_ranks)
    try:
        assert failing.process.wait(30) == 1
        check_end(failing, "engine-failed", "libcudart.so.13", sockets)
        (trace,) = sockets.glob("vllm-trace-*")
        assert str(broken) in trace.read_text()  # where it was raised, in whichever process
    finally:
        failing.close()
