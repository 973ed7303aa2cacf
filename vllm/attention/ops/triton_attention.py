# SPDX-License-Identifier: Apache-2.0
"""Portable paged attention in Triton: chooses and launches the decode and prefill kernels.

Same operation as `reference.paged_attention`. Requests of few query rows (tokens times query
heads a KV head) go to the split-KV kernel, longer ones to the query-tile kernel; a mixed
batch is cut at `num_decode_reqs`. Nothing here waits for the device, and grids depend only
on shapes and upper bounds, so every launch can be captured in a CUDA graph.
"""

from __future__ import annotations

import math

import torch

from vllm.attention.ops.configs import (
    KernelConfig,
    bias_tiles_ahead,
    decode_config,
    next_power_of_2,
    prefill_config,
)
from vllm.attention.ops.triton_decode import combine_kernel, decode_kernel
from vllm.attention.ops.triton_prefill import prefill_kernel
from vllm.layers.ops.chips import dependent_launch, device_arch, num_multiprocessors

MAX_DECODE_ROWS = 128
"""Most rows (query tokens times query heads a KV head) that the split-KV kernel takes."""
MIN_TILES = 2
"""Fewest key tiles a decode program takes; less makes more parts than it hides latency."""
BLOCK_PARTS = 32
"""Parts that the combining kernel joins at a time."""


def paged_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    rel_logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    num_decode_reqs: int = 0,
) -> None:
    """Causal attention of each request's last tokens over its paged keys, into `out`.

    Arguments as in `reference.paged_attention`, and:

    Args:
        max_query_len: at least the longest run of query tokens; chooses the kernel.
        workspace: flat float32 scratch of at least `workspace_elements()`; None allocates.
        num_decode_reqs: the first requests with exactly one query token each.

    The last axis of q, out, rel_logits and the caches must be contiguous. Rows of `out`
    that no request owns are left as they are.
    """
    group = q.shape[1] // k_cache.shape[2]
    if max_query_len * group <= MAX_DECODE_ROWS:
        launch_decode(
            out, q, k_cache, v_cache, block_table, seq_lens, query_start_loc, max_query_len,
            scale, window, rel_logits, workspace,
        )  # fmt: skip
        return
    split = num_decode_reqs
    if split > 0:
        launch_decode(
            out, q, k_cache, v_cache, block_table[:split], seq_lens[:split],
            query_start_loc[: split + 1], 1, scale, window, rel_logits, workspace,
        )  # fmt: skip
    launch_prefill(
        out, q, k_cache, v_cache, block_table[split:], seq_lens[split:], query_start_loc[split:],
        max_query_len, q.shape[0] - split, scale, window, rel_logits,
    )  # fmt: skip


def workspace_elements(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> int:
    """Float32 elements of scratch that any call with these shapes needs."""
    most = 0
    arch, sms = device_arch(device), num_multiprocessors(device)
    rows = num_heads // num_kv_heads
    while rows <= max(MAX_DECODE_ROWS, num_heads // num_kv_heads):
        config = decode_config(arch, rows, head_dim, dtype.itemsize)
        most = max(most, _workspace_elements(config, sms, head_dim))
        rows *= 2
    return most


def _workspace_elements(config: KernelConfig, num_sms: int, head_dim: int) -> int:
    parts = 2 * num_sms * config.programs_per_sm * config.block_m
    return parts * (_block_d(head_dim) + 1)


def _block_d(head_dim: int) -> int:
    """Width of a head as a tile: a power of two that `tl.dot` accepts."""
    return max(16, next_power_of_2(head_dim))


def _block_b(num_reqs: int) -> int:
    """Length of the per-request vectors; few values, so that few kernels are compiled."""
    return 32 if num_reqs <= 32 else max(256, next_power_of_2(num_reqs))


def launch_decode(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    rel_logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    config: KernelConfig | None = None,
) -> None:
    """Split-KV attention of requests with at most `max_query_len` query tokens."""
    num_reqs, num_kv_heads, head_dim = seq_lens.shape[0], k_cache.shape[2], q.shape[2]
    if num_reqs == 0:
        return
    group = q.shape[1] // num_kv_heads
    num_sms = num_multiprocessors(q.device)
    config = config or decode_config(
        device_arch(q.device),
        max_query_len * group,
        head_dim,
        k_cache.element_size(),
        k_cache.shape[1],
    )
    block_d, block_b = _block_d(head_dim), _block_b(num_reqs)
    num_programs = num_sms * config.programs_per_sm
    elements = _workspace_elements(config, num_sms, head_dim)
    if workspace is None:
        workspace = torch.empty(elements, dtype=torch.float32, device=q.device)
    partial, lse = workspace, workspace[elements // (block_d + 1) * block_d :]
    rel = q if rel_logits is None else rel_logits
    shared = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "WINDOW": window or 0,
        "REL_EXTENT": 0 if rel_logits is None else rel_logits.shape[2],
        "MIN_TILES": MIN_TILES,
        "BLOCK_B": block_b,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": block_d,
    }
    dependent = dependent_launch(q.device)
    decode_kernel[(num_programs,)](
        out, partial, lse, q, k_cache, v_cache, rel, block_table, seq_lens, query_start_loc,
        scale * math.log2(math.e), num_reqs, num_kv_heads, out.stride(0), out.stride(1),
        q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3], rel.stride(0),
        rel.stride(1), block_table.stride(0),
        PAGE=k_cache.shape[1],
        num_warps=config.num_warps, num_stages=config.num_stages, **dependent, **shared,
    )  # fmt: skip
    pairs, rows = num_reqs * num_kv_heads, max_query_len * group
    row_programs = min(rows, max(1, 4 * num_sms // pairs))
    combine_kernel[(pairs, row_programs)](
        out, partial, lse, seq_lens, query_start_loc, num_reqs, num_kv_heads, num_programs,
        out.stride(0), out.stride(1), BLOCK_S=BLOCK_PARTS, num_warps=4, **dependent, **shared,
    )  # fmt: skip


def launch_prefill(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    num_tokens: int,
    scale: float,
    window: int | None = None,
    rel_logits: torch.Tensor | None = None,
    config: KernelConfig | None = None,
) -> None:
    """Query-tile attention; `num_tokens` bounds the requests' query tokens together."""
    num_reqs, num_kv_heads, head_dim = seq_lens.shape[0], k_cache.shape[2], q.shape[2]
    if num_reqs == 0:
        return
    group = q.shape[1] // num_kv_heads
    config = config or prefill_config(
        device_arch(q.device),
        max_query_len * group,
        head_dim,
        k_cache.element_size(),
        rel_logits is not None,
    )
    block_m = max(config.block_m, next_power_of_2(group))
    num_q_tiles = num_tokens // (block_m // group) + num_reqs
    rel = q if rel_logits is None else rel_logits
    prefill_kernel[(num_q_tiles * num_kv_heads,)](
        out, q, k_cache, v_cache, rel, block_table, seq_lens, query_start_loc,
        scale * math.log2(math.e), num_reqs, num_kv_heads, out.stride(0), out.stride(1),
        q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3], rel.stride(0),
        rel.stride(1), block_table.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=k_cache.shape[1],
        WINDOW=window or 0,
        REL_EXTENT=0 if rel_logits is None else rel_logits.shape[2],
        BLOCK_B=_block_b(num_reqs),
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=_block_d(head_dim),
        AHEAD=bias_tiles_ahead(device_arch(q.device)),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
