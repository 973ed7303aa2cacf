# SPDX-License-Identifier: Apache-2.0
"""Memory plans against figures computed by hand; refusals only beyond the lower bound."""

from __future__ import annotations

import pytest

from vllm.config.kv_cache import KVCacheGroup, LayerCacheSpec
from vllm.preflight.memory import (
    DeviceMemory,
    MemoryPlan,
    check_concurrency,
    check_memory,
    loaded_bytes,
    longest_sequence,
    plan_memory,
    weight_bytes,
)
from vllm.preflight.safetensors_header import TensorInfo

GiB = 1 << 30


def info(name: str, dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, dtype, shape, 0, "f")


def groups(num_full: int, num_sliding: int = 0, window: int = 512) -> tuple[KVCacheGroup, ...]:
    def layers(count: int, kind: str) -> tuple[LayerCacheSpec, ...]:
        return tuple(LayerCacheSpec(f"{kind}.{i}", 2, 8, 128) for i in range(count))

    result = (KVCacheGroup("full", layers(num_full, "full")),)
    if num_sliding:
        result += (KVCacheGroup("sliding", layers(num_sliding, "sliding"), window=window),)
    return result


def test_stored_values_become_the_models_dtype() -> None:
    assert loaded_bytes(info("w", "F32", 4, 4), 2) == 32
    assert loaded_bytes(info("w", "BF16", 4, 4), 4) == 64
    assert loaded_bytes(info("w", "Q4_1", 32, 32), 2) == 2048


def test_two_packed_values_share_a_byte_and_scales_vanish() -> None:
    assert loaded_bytes(info("experts.w13_weight", "U8", 8, 64, 32), 2) == 8 * 64 * 64 * 2
    assert loaded_bytes(info("experts.w13_weight.scale", "F8_E4M3", 8, 64, 4), 2) == 0
    assert loaded_bytes(info("experts.w13_weight.scale2", "F32", 8), 2) == 0


def test_matrices_are_sharded_and_vectors_are_not() -> None:
    tensors = [info("w", "BF16", 100, 10), info("norm", "BF16", 100)]
    assert weight_bytes(tensors, 2, 1) == (2200, 2200)
    assert weight_bytes(tensors, 2, 4) == (550, 500 + 200)


def test_seven_global_and_35_sliding_layers_cost_a_token_28_kib() -> None:
    """Inkling-Small's published figure: 28,672 bytes a token, the window apart."""
    plan = plan_memory((0, 0), 0, groups(7, 35), 16, 131072, 2048, 10 * GiB)
    assert plan.kv_bytes_per_token == 28672
    full = 131072 * 28672
    sliding = (-(-(511 + 2048) // 16) + 1) * 16 * 35 * 4096
    assert plan.sequence_bytes == full + sliding
    assert plan.full_sequences == pytest.approx(10 * GiB / (full + sliding))


def test_the_longest_sequence_that_fits_is_exact() -> None:
    one_layer = groups(1)
    per_block = 16 * 4096
    assert longest_sequence(one_layer, 16, 2048, 4096, 10 * per_block) == 160
    assert longest_sequence(one_layer, 16, 2048, 4096, 10 * per_block - 1) == 144
    assert longest_sequence(one_layer, 16, 2048, 64, 10 * per_block) == 64
    assert longest_sequence(one_layer, 16, 2048, 4096, 0) == 0


def check(weights: tuple[int, int], sequence: int, memory: DeviceMemory) -> list:
    plan = MemoryPlan(weights[1], weights[0], GiB, 1000, sequence, 0, 0, 0.0)
    return check_memory(plan, memory, "GPU 0", 1024, 8192, 1, 2)


def device(total: int, free: int | None = None) -> DeviceMemory:
    free = total if free is None else free
    return DeviceMemory("Card", total * GiB, free * GiB, min(total * 9 // 10, free) * GiB)


def test_weights_above_the_budget_are_refused_with_the_size_that_would_do() -> None:
    (found,) = check((140 * GiB, 140 * GiB), GiB, device(80))
    assert (found.code, int(found.exit_code)) == ("memory-weights", 3)
    assert found.subject == "the weights take 140.0 GiB, Card can give 72.0 GiB"
    assert "--tensor-parallel-size 2" in found.fix


def test_memory_that_others_hold_is_said_to_be_the_cause() -> None:
    (found,) = check((60 * GiB, 60 * GiB), GiB, device(80, free=10))
    assert "free the 70.0 GiB that other processes hold" in found.fix


def test_a_cache_that_cannot_hold_one_sequence_names_the_longest() -> None:
    (found,) = check((60 * GiB, 60 * GiB), 20 * GiB, device(80))
    assert (found.code, int(found.exit_code)) == ("memory-kv-cache", 4)
    assert "8,192 tokens: it takes 20.0 GiB, 12.0 GiB are left" in found.subject
    assert "--max-model-len 1024" in found.fix


def test_between_the_bounds_it_is_only_a_warning() -> None:
    (found,) = check((60 * GiB, 71 * GiB), 5 * GiB, device(80))
    assert (found.severity, found.code) == ("warning", "memory-tight")
    assert check((60 * GiB, 61 * GiB), 5 * GiB, device(80)) == []


def test_more_sequences_than_blocks_can_only_preempt() -> None:
    plan = plan_memory((0, 0), 0, groups(1), 16, 4096, 2048, 100 * 16 * 4096)
    (found,) = check_concurrency(plan, 256, 16)
    assert found.code == "memory-preempts" and found.severity == "warning"
    assert check_concurrency(plan, 64, 16) == []
