# SPDX-License-Identifier: Apache-2.0
"""Cache groups of a model on one rank, and how memory is shared out among them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vllm.config.kv_cache import KVCacheConfig, KVCacheGroup, LayerCacheSpec, sequence_bytes
from vllm.config.shape import LayerShape, ModelShape
from vllm.errors import ConfigError, Diagnostic

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

MIN_BLOCKS = 2
"""The null block and one to use."""


def cache_groups(
    shape: ModelShape,
    block_size: int,
    tp: int,
    dtype_bytes: int,
    draft_layers: tuple[LayerShape, ...] = (),
    num_draft_tokens: int = 0,
) -> tuple[KVCacheGroup, ...]:
    """Layers by what they need: full, one group a window length, convolutions.

    `draft_layers` are those of the draft head, which sees the same tokens.
    """
    names = [f"layers.{i}" for i in range(shape.num_layers)]
    names += [f"mtp.layers.{i}.transformer_block" for i in range(len(draft_layers))]
    attention: dict[int | None, list[LayerCacheSpec]] = {}
    convolutions: dict[int, list[LayerCacheSpec]] = {}
    for name, layer in zip(names, (*shape.layers, *draft_layers), strict=True):
        kv_heads = max(1, layer.num_kv_heads // tp)
        attention.setdefault(layer.window, []).append(
            LayerCacheSpec(f"{name}.attn", dtype_bytes, kv_heads, layer.head_dim)
        )
        if layer.conv_taps:
            # K and V streams are sharded like their heads, the other two are whole.
            kv_width = 2 * layer.num_kv_heads * layer.head_dim
            width = layer.conv_width - kv_width + kv_width // tp
            convolutions.setdefault(layer.conv_taps, []).append(
                LayerCacheSpec(f"{name}.conv", dtype_bytes, conv_width=width)
            )
    groups = [
        KVCacheGroup("sliding" if window else "full", tuple(layers), window)
        for window, layers in sorted(attention.items(), key=lambda item: item[0] or 0)
    ]
    for taps, layers in convolutions.items():
        rows = min(block_size, 1 << (taps + num_draft_tokens - 1).bit_length())
        groups.append(KVCacheGroup("conv", tuple(layers), taps, rows))
    return tuple(groups)


def groups_of(vllm_config: VllmConfig, tp: int | None = None) -> tuple[KVCacheGroup, ...]:
    """The groups of a validated configuration, or what they were with `tp` ranks."""
    model_config, speculative = vllm_config.model_config, vllm_config.speculative_config
    num_drafts = (speculative.num_speculative_tokens or 0) if speculative else 0
    return cache_groups(
        model_config.shape,
        vllm_config.block_size,
        tp or vllm_config.parallel_config.tensor_parallel_size,
        model_config.dtype_bytes,
        model_config.shape.mtp_layers[:num_drafts],
        num_drafts,
    )


def full_sequence_bytes(vllm_config: VllmConfig, tp: int | None = None) -> int:
    """Cache of one sequence of max_model_len on one rank, its null blocks included."""
    groups, block_size = groups_of(vllm_config, tp), vllm_config.block_size
    chunk = vllm_config.scheduler_config.max_num_batched_tokens or 0
    length = vllm_config.model_config.max_model_len or 0
    null_blocks = sum(group.block_bytes(block_size) for group in groups)
    return sequence_bytes(groups, block_size, length, chunk) + 2 * null_blocks


def plan_kv_cache(vllm_config: VllmConfig, available_bytes: int) -> KVCacheConfig:
    """Blocks of each group within `available_bytes` of one rank.

    Raises `ConfigError` naming the longest sequence that fits if one of max_model_len does not.
    """
    block_size = vllm_config.block_size
    groups = groups_of(vllm_config)
    scheduler = vllm_config.scheduler_config
    chunk = scheduler.max_num_batched_tokens or 0
    max_len = vllm_config.model_config.max_model_len or 0

    def blocks(tokens: int) -> tuple[int, ...]:
        return _blocks(groups, block_size, tokens, scheduler.max_num_seqs, chunk, max_len)

    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is not None:
        return KVCacheConfig(block_size, groups, blocks((override - 1) * block_size))
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high + 1) // 2
        tokens = middle * block_size
        if KVCacheConfig(block_size, groups, blocks(tokens)).total_bytes <= available_bytes:
            low = middle
        else:
            high = middle - 1
    if low * block_size < max_len:
        raise _too_small(groups, block_size, chunk, max_len, available_bytes, low)
    return KVCacheConfig(block_size, groups, blocks(low * block_size))


def _blocks(
    groups: tuple[KVCacheGroup, ...],
    block_size: int,
    tokens: int,
    max_num_seqs: int,
    chunk: int,
    max_len: int,
) -> tuple[int, ...]:
    """Blocks of each group when the whole cache stands for `tokens` tokens.

    A windowed group never holds more blocks than a full one; what all running sequences can
    need at once is enough, and as much again so that prefixes stay for later requests.
    """
    full = math.ceil(tokens / block_size)
    counts = []
    for group in groups:
        needed = full
        if group.window is not None:
            behind = math.ceil((group.window - 1) / block_size) + 1
            running = max_num_seqs * behind + math.ceil(chunk / block_size)
            alone = group.blocks_per_sequence(max_len, block_size, chunk)
            needed = min(full, max(2 * running, alone))
        counts.append(max(MIN_BLOCKS, needed + 1))
    return tuple(counts)


def _too_small(
    groups: tuple[KVCacheGroup, ...],
    block_size: int,
    chunk: int,
    max_len: int,
    available_bytes: int,
    blocks: int,
) -> ConfigError:
    needed = sequence_bytes(groups, block_size, max_len, chunk)
    longest = blocks * block_size
    fix = f"--max-model-len {longest}" if longest else "free memory, or a smaller model"
    return ConfigError(
        Diagnostic(
            "memory-kv-cache",
            f"the KV cache cannot hold one sequence of {max_len:,} tokens: it takes "
            f"{needed / 2**30:.2f} GiB, {max(0, available_bytes) / 2**30:.2f} GiB are there",
            where="after the weights were loaded",
            fix=f"{fix}, or more memory (--gpu-memory-utilization, VLLM_CPU_KVCACHE_SPACE)",
        )
    )
