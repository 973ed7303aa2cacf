# SPDX-License-Identifier: Apache-2.0
"""A configuration's memory plan on the device with the least, and whether it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.config.kv_cache import sequence_bytes
from vllm.config.kv_plan import full_sequence_bytes, groups_of, plan_kv_cache
from vllm.errors import Diagnostic
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Device
from vllm.preflight.memory import (
    DeviceMemory,
    MemoryPlan,
    activation_bytes,
    check_concurrency,
    check_memory,
    longest_sequence,
    plan_memory,
    weight_bytes,
)
from vllm.preflight.safetensors_header import TensorInfo

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

_MAX_SHARDS = 64
"""Largest tensor-parallel size that a suggestion tries."""

Tensors = Mapping[str, TensorInfo]


def check_fit(
    config: VllmConfig, tensors: Tensors, findings: list[Diagnostic]
) -> MemoryPlan | None:
    """The plan of the rank with the least memory; None where no device tells its memory."""
    ranks = config.parallel_config.world_size
    on_host = config.device_config.kind == "cpu"
    memories = [
        (memory, device)
        for device in config.device_config.devices[:ranks]
        if (memory := device_memory(config, device, ranks if on_host else 1)) is not None
    ]
    if not memories:
        return None
    memory, device = min(memories, key=lambda item: item[0].budget)
    plan = _memory_plan(config, tensors, memory)
    tp, too_big = config.parallel_config.tensor_parallel_size, plan.weight_bytes_lower
    found = check_memory(
        plan,
        memory,
        "host memory" if on_host else f"GPU {device.index}",
        _longest(config, memory.budget - plan.weight_bytes - plan.activation_bytes),
        config.model_config.max_model_len or 0,
        tp,
        _smallest_tp(config, tensors, memory) if too_big > memory.budget else None,
    )
    if not found and (on_host or config.cache_config.kv_cache_memory_bytes is not None):
        found = _check_cache_limit(config, plan)
    findings += found or check_concurrency(
        plan, config.scheduler_config.max_num_seqs, config.block_size
    )
    return plan


def device_memory(config: VllmConfig, device: Device, ranks: int) -> DeviceMemory | None:
    """One rank's share of a device; None where the device does not tell its memory."""
    if device.memory_total is None:
        return None
    free = device.memory_total if device.memory_free is None else device.memory_free
    total, free = device.memory_total // ranks, free // ranks
    budget = free
    if config.device_config.kind != "cpu":
        budget = min(int(total * config.cache_config.gpu_memory_utilization), free)
    return DeviceMemory(device.name, total, free, budget, device.is_unified)


def _memory_plan(config: VllmConfig, tensors: Tensors, memory: DeviceMemory) -> MemoryPlan:
    weights, activations = _needs(config, tensors, config.parallel_config.tensor_parallel_size)
    left = memory.budget - weights[1] - activations
    if config.cache_config.kv_cache_memory_bytes is not None:
        kv_budget = config.cache_config.kv_cache_memory_bytes
    elif config.device_config.kind == "cpu":
        sequence = full_sequence_bytes(config)
        kv_budget = min(left, CpuPlatform.kv_cache_bytes(max(0, left), sequence))
    else:
        kv_budget = left
    plan = plan_memory(
        weights,
        activations,
        groups_of(config),
        config.block_size,
        config.model_config.max_model_len or 0,
        config.scheduler_config.max_num_batched_tokens or 0,
        kv_budget,
    )
    if (blocks := config.cache_config.num_gpu_blocks_override) is None:
        return plan
    # The cache is as large as it was asked to be, whatever a sequence of full length needs.
    size, tokens = plan_kv_cache(config, 0).total_bytes, (blocks - 1) * config.block_size
    full = tokens / (config.model_config.max_model_len or 1)
    return dataclasses.replace(
        plan, sequence_bytes=size, kv_bytes=size, kv_tokens=tokens, full_sequences=full
    )


def _needs(config: VllmConfig, tensors: Tensors, tp: int) -> tuple[tuple[int, int], int]:
    """Weights (lower bound, estimate) and activations of one of `tp` ranks."""
    model, scheduler = config.model_config, config.scheduler_config
    weights = weight_bytes(tensors.values(), model.dtype_bytes, tp)
    activations = activation_bytes(
        model.shape,
        model.dtype_bytes,
        tp,
        scheduler.max_num_batched_tokens or 0,
        scheduler.max_num_seqs,
    )
    return weights, activations


def _longest(config: VllmConfig, budget: int) -> int:
    """Longest sequence whose cache fits `budget` bytes, with the null blocks beside it."""
    groups, chunk = groups_of(config), config.scheduler_config.max_num_batched_tokens or 0
    length = config.model_config.max_model_len or 0
    whole = sequence_bytes(groups, config.block_size, length, chunk)
    beside = full_sequence_bytes(config) - whole
    return longest_sequence(groups, config.block_size, chunk, length, budget - beside)


def _check_cache_limit(config: VllmConfig, plan: MemoryPlan) -> list[Diagnostic]:
    """A cache whose size is given, not what is left over, must hold one whole sequence."""
    needed = full_sequence_bytes(config)
    if plan.kv_bytes >= needed or config.cache_config.num_gpu_blocks_override is not None:
        return []
    flag = "--kv-cache-memory-bytes"
    if config.cache_config.kv_cache_memory_bytes is None:
        flag = "VLLM_CPU_KVCACHE_SPACE (GiB)"
    longest, gib = _longest(config, plan.kv_bytes), 1 << 30
    shorter = f"--max-model-len {longest}, or " if longest else ""
    return [
        Diagnostic(
            "memory-kv-cache",
            f"the KV cache cannot hold one sequence of {config.model_config.max_model_len:,} "
            f"tokens: it takes {needed / gib:.2f} GiB, the cache has {plan.kv_bytes / gib:.2f} GiB",
            fix=f"{shorter}more for {flag}",
        )
    ]


def _smallest_tp(config: VllmConfig, tensors: Tensors, memory: DeviceMemory) -> int | None:
    """Least doubling of the ranks at which weights, activations and one sequence would fit."""
    if config.device_config.kind == "cpu":
        return None
    parallel, tp = config.parallel_config, config.parallel_config.tensor_parallel_size * 2
    while tp <= _MAX_SHARDS:
        weights, activations = _needs(config, tensors, tp)
        need = weights[1] + activations + full_sequence_bytes(config, tp)
        if need <= memory.budget and parallel.fits(config.model_config.shape, tp):
            return tp
        tp *= 2
    return None
