# SPDX-License-Identifier: Apache-2.0
"""The core over a real model: greedy tokens do not depend on how they were scheduled."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fixtures.tiny_models import tiny_checkpoint
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.engine.core import EngineCore
from vllm.engine.messages import EngineCoreRequest
from vllm.sampling_params import SamplingParams

MAX_LEN = 80


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return tiny_checkpoint("llama")


def start(checkpoint: Path, *, blocks: int | None = None, caching: bool = True, **scheduler):
    config = VllmConfig(
        ModelConfig(model=str(checkpoint), dtype="float32", max_model_len=MAX_LEN),
        cache_config=CacheConfig(
            block_size=16,
            enable_prefix_caching=caching,
            num_gpu_blocks_override=blocks or 200,
        ),
        scheduler_config=SchedulerConfig(**scheduler),
    )
    return EngineCore.create(config)


def requests() -> list[EngineCoreRequest]:
    """Twelve prompts, four of which begin alike."""
    rng = random.Random(3)
    stem = [rng.randrange(3, 90) for _ in range(35)]
    prompts = [[rng.randrange(3, 90) for _ in range(rng.randrange(1, 50))] for _ in range(8)]
    prompts += [stem + [rng.randrange(3, 90) for _ in range(n)] for n in (1, 2, 13, 14)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    return [EngineCoreRequest(f"r{i}", p, params, 0.0) for i, p in enumerate(prompts)]


def run(core: EngineCore, batch: list[EngineCoreRequest]) -> tuple[dict[str, list[int]], int]:
    """Tokens of each request, and how often one was preempted."""
    tokens: dict[str, list[int]] = {r.request_id: [] for r in batch}
    preemptions = 0
    for request in batch:
        core.add_request(request)
    while core.has_work:
        step = core.step()
        preemptions += step.stats.num_preemptions
        for output in step.outputs:
            assert output.error is None
            tokens[output.request_id] += output.new_token_ids
    return tokens, preemptions


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> dict[str, list[int]]:
    core = start(checkpoint, caching=False)
    tokens = {}
    for request in requests():
        tokens.update(run(core, [request])[0])
    core.shutdown()
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"caching": False},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"blocks": 10},
        {"blocks": 10, "async_scheduling": True, "max_num_batched_tokens": 32, "max_num_seqs": 9},
    ],
    ids=["cached", "uncached", "async", "chunks", "preempted", "all of it"],
)
def test_a_request_in_a_batch_gets_the_tokens_it_gets_alone(checkpoint, alone, options):
    core = start(checkpoint, **options)
    for _ in range(2):  # the second time out of the cache
        tokens, preemptions = run(core, requests())
        assert tokens == alone
        assert (preemptions > 0) == ("blocks" in options)
    core.shutdown()
