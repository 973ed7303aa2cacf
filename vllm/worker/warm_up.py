# SPDX-License-Identifier: Apache-2.0
"""Before the first request: run what requests can reach, so that nobody waits for a compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.engine.messages import NewRequestData, SchedulerOutput
from vllm.sampling_params import SamplingParams
from vllm.worker.cuda_graph import DecodeGraphs
from vllm.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

_SAMPLED = SamplingParams(temperature=0.8, top_k=8, top_p=0.9, min_p=0.01, seed=1, max_tokens=2)
_GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


def warm_up(runner: ModelRunner, config: VllmConfig) -> None:
    """A prompt, a decode step and a mixed step, then the decode graphs on a GPU."""
    assert config.scheduler_config.max_num_batched_tokens is not None
    length = min(
        config.scheduler_config.max_num_batched_tokens // 2,
        (config.model_config.max_model_len or 2) // 2,
        64 if runner.device.type == "cpu" else 2048,
    )
    _prompt_and_decode(runner, max(1, length), _GREEDY)
    _prompt_and_decode(runner, 1, _SAMPLED)
    if runner.device.type == "cpu" or config.model_config.enforce_eager:
        return
    limit = config.scheduler_config.max_num_seqs
    runner.graphs = DecodeGraphs(
        runner.model,
        runner.inputs,
        config.compilation_config.sizes_up_to(limit),
        runner.kv_config.block_size,
        config.model_config.max_model_len or 0,
    )
    _prompt_and_decode(runner, 1, _GREEDY)
    torch.cuda.synchronize(runner.device)


def _prompt_and_decode(runner: ModelRunner, length: int, params: SamplingParams) -> None:
    """One made-up request, its blocks all the null block's neighbour."""
    num_blocks = (length + 2) // runner.kv_config.block_size + 1
    blocks = [[1] * num_blocks for _ in runner.kv_config.groups]
    new = NewRequestData("warm-up", [0] * length, length, params, blocks, 0)
    runner.execute(_step([new], length, [])).result()
    runner.batch.num_computed[runner.batch.requests["warm-up"].row] = length
    runner.execute(_step([], 1, [])).result()
    runner.batch.update(_step([], 0, ["warm-up"]))


def _step(new: list[NewRequestData], count: int, finished: list[str]) -> SchedulerOutput:
    scheduled = {"warm-up": count} if count else {}
    return SchedulerOutput(0, new, [], scheduled, {}, finished, count)
