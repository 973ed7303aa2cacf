# SPDX-License-Identifier: Apache-2.0
"""Two Gloo ranks in processes of their own: one rank's tokens, and deaths that are told."""

from __future__ import annotations

import os
import signal

import pytest

from tests.fixtures.tiny_models import tiny_checkpoint
from vllm import LLM, SamplingParams
from vllm.errors import EngineDeadError

PROMPTS = [[5, 6, 7, 8, 9] * 6, [11, 3, 4]]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def make(family: str, ranks: int) -> LLM:
    return LLM(
        str(tiny_checkpoint(family)),
        tensor_parallel_size=ranks,
        skip_tokenizer_init=True,
        dtype="float32",
        num_gpu_blocks_override=64,
    )


def tokens(llm: LLM, **options: object) -> list[list[int]]:
    params = SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False, **options)
    results = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(r.outputs[0].token_ids) for r in results]


@pytest.mark.parametrize("family", ["llama", "inkling"])
def test_two_ranks_give_one_ranks_tokens(family: str) -> None:
    answers = []
    for ranks in (1, 2):
        llm = make(family, ranks)
        answers.append((tokens(llm, temperature=0.0), tokens(llm, temperature=1.0, top_k=20)))
        llm.shutdown()
    assert answers[0] == answers[1]


def test_a_killed_rank_is_named_and_nobody_waits() -> None:
    llm = make("llama", 2)
    executor = llm._engine._core.executor
    victim = executor._processes[1]
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    with pytest.raises(EngineDeadError, match=r"vllm-rank-1 .* ended with signal SIGKILL"):
        executor.check_health()
    with pytest.raises(EngineDeadError, match="vllm-rank-1"):
        tokens(llm, temperature=0.0)
    llm.shutdown()
    assert not any(p.is_alive() for p in executor._processes)
