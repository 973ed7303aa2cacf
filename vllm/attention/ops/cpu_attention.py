# SPDX-License-Identifier: Apache-2.0
"""The C++ attention kernel (csrc/cpu/paged_attention.cpp), where it was built."""

from __future__ import annotations

import ctypes

import torch

from vllm.layers.ops.cpu import DTYPES, cpu_kernels, has_kernels


def can_attend(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel is there for this dtype and head width."""
    return has_kernels(dtype) and head_dim % cpu_kernels().vllm_attention_lanes() == 0


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    window: int | None = None,
    rel_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each request's last tokens over its paged keys; dense, like q.

    q: (num_tokens, heads, head_dim), last axis contiguous. Caches: (blocks, block_size, kv_heads,
    head_dim), contiguous. block_table: (num_reqs, max_blocks); seq_lens: (num_reqs,), keys with
    this step's; query_start_loc: (num_reqs + 1,); all int32. rel_logits: (num_tokens, heads,
    extent).
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    rel_strides = (0, 0) if rel_logits is None else rel_logits.stride()[:2]
    sizes = (ctypes.c_int64 * 12)(
        len(seq_lens),
        q.shape[1],
        k_cache.shape[2],
        q.shape[2],
        k_cache.shape[1],
        block_table.stride(0),
        q.stride(0),
        q.stride(1),
        *rel_strides,
        0 if rel_logits is None else rel_logits.shape[2],
        window or 0,
    )
    cpu_kernels().vllm_paged_attention(
        DTYPES[q.dtype],
        out.data_ptr(),
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_table.data_ptr(),
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        None if rel_logits is None else rel_logits.data_ptr(),
        sizes,
        scale,
    )
    return out
