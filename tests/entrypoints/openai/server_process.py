# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` subprocess for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[3]


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server process; `url` without a path."""

    def __init__(self, model: str, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tempfile.NamedTemporaryFile("w+", prefix="vllm-serve-", suffix=".log")  # noqa: SIM115
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = ["-m", "vllm.entrypoints.cli.main", "serve", *([model] if model else [])]
        self.process = subprocess.Popen(
            [sys.executable, *command, "--host", "127.0.0.1", "--port", str(self.port), *flags],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env={**environment, "VLLM_CPU_KVCACHE_SPACE": "0.1"},
            start_new_session=True,
        )

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Until /health is 200. Fails with the log if the process ends first."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.text()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"not ready after {timeout_s} s:\n{self.text()}")

    def text(self) -> str:
        """What it printed."""
        return Path(self.log.name).read_text()

    def core_pid(self) -> int:
        """The engine core's process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return next(pid for pid in map(int, children.read_text().split()) if _runs_core(pid))

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the server."""
        self.process.send_signal(number)

    def survivors(self) -> list[int]:
        """Processes of its session that still run."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        """End it and everything it started."""
        if self.process.poll() is None:
            self.signal()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        for pid in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def metric(self, name: str) -> float:
        """A metric's value from /metrics."""
        text = httpx.get(f"{self.url}/metrics").text
        lines = [li for li in text.splitlines() if li.startswith((name + "{", name + " "))]
        assert lines, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _runs_core(pid: int) -> bool:
    return b"core_process" in Path(f"/proc/{pid}/cmdline").read_bytes()


@contextlib.contextmanager
def running_server(model: Any, *flags: str) -> Iterator[Server]:
    """A server that is ready."""
    server = Server(str(model), *flags)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()
