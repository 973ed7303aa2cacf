# SPDX-License-Identifier: Apache-2.0
"""`make demo` without the installation: a real server, the embedded model, a real answer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def demo(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.skipif(
    not Path(sys.executable).with_name("vllm").exists(),
    reason="the demo starts the installed console script: pip install -e .",
)
class TestDemo:
    def test_the_embedded_model_answers_and_the_server_stops(self) -> None:
        finished = demo(VLLM_CPU_KVCACHE_SPACE="0.5")
        assert finished.returncode == 0, finished.stdout + finished.stderr
        assert "Paris" in finished.stdout
        speed = re.search(r"(\d+) tokens, first after \d+ ms, then ([\d.]+) tok", finished.stdout)
        assert speed and int(speed[1]) > 20 and float(speed[2]) > 0
        assert finished.stdout.endswith("done:   the server stopped\n")

    def test_a_server_that_cannot_start_fails_the_demo_and_shows_its_log(self) -> None:
        finished = demo(VLLM_CPU_KVCACHE_SPACE="much")
        assert finished.returncode == 1
        assert "error: the server ended with status 2" in finished.stderr
        assert "error[invalid-environment]: VLLM_CPU_KVCACHE_SPACE='much'" in finished.stderr
