# SPDX-License-Identifier: Apache-2.0
"""Environment variables that are more than a number or a word."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.fixtures.tiny_models import tiny_checkpoint
from vllm import envs
from vllm.errors import VLLMError

BIND = "VLLM_CPU_OMP_THREADS_BIND"


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("auto", None),
        ("nobind", None),
        ("", None),
        ("3", [[3]]),
        ("0-2,8", [[0, 1, 2, 8]]),
        ("0-1|4-5", [[0, 1], [4, 5]]),
    ],
)
def test_cores_are_named_by_rank(
    text: str, cores: list[list[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BIND, text)
    assert cores == envs.VLLM_CPU_OMP_THREADS_BIND


@pytest.mark.parametrize("text", ["all", "3-1", "0,", "0-1-2"])
def test_a_malformed_list_of_cores_is_told(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BIND, text)
    with pytest.raises(VLLMError, match=f"{BIND}='{text}' is not a valid core list"):
        _ = envs.VLLM_CPU_OMP_THREADS_BIND


def run_llm(cores: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    code = (
        "import os, torch\n"
        "from vllm import LLM\n"
        f"LLM({str(tiny_checkpoint('llama'))!r}, tensor_parallel_size={ranks})\n"
        "print(sorted(os.sched_getaffinity(0)), torch.get_num_threads())\n"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, BIND: cores, "VLLM_CPU_KVCACHE_SPACE": "0.1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_threads_stay_on_the_cores_that_are_named() -> None:
    core = max(os.sched_getaffinity(0))
    assert run_llm(str(core)).stdout.splitlines()[-1] == f"[{core}] 1"


def test_a_core_that_the_process_may_not_use_is_told_before_loading() -> None:
    core = max(os.sched_getaffinity(0)) + 1
    finished = run_llm(f"0-{core}")
    assert finished.returncode != 0
    assert f"{BIND} names core" in finished.stderr
    assert "Loaded weights" not in finished.stderr


def test_cores_for_fewer_ranks_than_there_are_is_told() -> None:
    core = min(os.sched_getaffinity(0))
    finished = run_llm(str(core), ranks=2)
    assert f"{BIND} names cores for 1 of 2 ranks" in finished.stderr
