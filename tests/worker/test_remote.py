# SPDX-License-Identifier: Apache-2.0
"""Two Gloo ranks as processes and as Ray actors: one rank's tokens, and ends that are told."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny_models import tiny_checkpoint
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError, EngineDeadError
from vllm.worker.executor import Executor
from vllm.worker.remote import family_of, free_port, meeting_point

PROMPTS = [[5, 6, 7, 8, 9] * 6, [11, 3, 4]]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(params=["mp", "ray"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("joined")
    return request.param


def settings(model: Path, ranks: int, backend: str | None) -> dict[str, Any]:
    return {
        "model": str(model),
        "tensor_parallel_size": ranks,
        "distributed_executor_backend": backend,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "num_gpu_blocks_override": 64,
    }


def tokens(llm: LLM, **options: object) -> list[list[int]]:
    params = SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False, **options)
    results = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(r.outputs[0].token_ids) for r in results]


@pytest.mark.parametrize("family", ["llama", "inkling"])
def test_two_ranks_give_one_ranks_tokens(backend: str, family: str) -> None:
    answers = []
    for ranks, started in ((1, None), (2, backend)):
        llm = LLM(**settings(tiny_checkpoint(family), ranks, started))
        answers.append((tokens(llm, temperature=0.0), tokens(llm, temperature=1.0, top_k=20)))
        llm.shutdown()
    assert answers[0] == answers[1]


NAMES = {
    "mp": r"vllm-rank-1 \(pid \d+\) ended with signal SIGKILL",
    "ray": r"rank 1 \(Ray actor, pid \d+ on [\d.]+\) is gone: .*worker process has died",
}


def pid_of(executor: Any, rank: int) -> int:
    started = getattr(executor, "_processes", None) or executor._places
    return int(started[rank].pid)


def test_a_killed_rank_is_named_and_nobody_waits(backend: str) -> None:
    llm = LLM(**settings(tiny_checkpoint("llama"), 2, backend))
    executor = llm._engine._core.executor
    pids = [pid_of(executor, rank) for rank in (0, 1)]
    os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=NAMES[backend]):
        tokens(llm, temperature=0.0)
    with pytest.raises(EngineDeadError, match=NAMES[backend]):
        executor.check_health()
    assert time.monotonic() - began < 8
    llm.shutdown()
    while time.monotonic() - began < 20 and any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_what_a_rank_raises_for_the_user_arrives_as_it_is(backend: str, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model")
    config = EngineArgs(**settings(model, 2, backend)).create_engine_config()
    (weights,) = model.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(ConfigError) as raised:
        Executor.create(config)
    (finding,) = raised.value.findings
    assert finding.code == "weights-truncated"
    assert str(weights.name) in finding.subject


def test_a_defect_in_a_rank_arrives_with_its_traceback(backend: str) -> None:
    args = EngineArgs(**settings(tiny_checkpoint("llama"), 2, backend))
    config = args.create_engine_config()
    config.model_config.resolved_dtype = "float31"
    with pytest.raises(EngineDeadError, match=r"rank [01]: AttributeError: .*float31") as raised:
        Executor.create(config)
    assert "getattr(torch, model_config.resolved_dtype)" in str(raised.value.__cause__)


def test_ranks_run_in_the_environment_of_the_front_end(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a GiB for both ranks, as the front end was told after Ray had started."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.25")
    config = EngineArgs(**settings(tiny_checkpoint("llama"), 2, backend)).create_engine_config()
    executor: Any = Executor.create(config)
    try:
        assert executor.kv_cache_memory_bytes() == (1 << 28) // 2
        started = Path(f"/proc/{pid_of(executor, 1)}/environ").read_bytes().split(b"\0")
        assert b"OMP_NUM_THREADS=1" in started
    finally:
        executor.shutdown()


def test_ports_start_where_the_user_says_and_skip_what_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setenv("VLLM_PORT", str(port))
        assert port < free_port("127.0.0.1") <= port + 255
    assert free_port("127.0.0.1") == port
    assert meeting_point("127.0.0.1") == f"tcp://127.0.0.1:{port}"
    assert family_of("127.0.0.1") == "AF_INET" and family_of("fe80::1") == "AF_INET6"
