# SPDX-License-Identifier: Apache-2.0
"""The C++ decode kernel (csrc/cpu/paged_attention.cpp), where it was built."""

from __future__ import annotations

import ctypes

import torch

from vllm.layers.ops.cpu import DTYPES, cpu_kernels


def can_decode(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel is there for this dtype and head width."""
    library = cpu_kernels()
    return library is not None and dtype in DTYPES and head_dim % library.vllm_decode_lanes() == 0


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    rel_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query token a request; (num_reqs, heads, head_dim).

    q: (num_reqs, heads, head_dim), last axis contiguous. Caches: (blocks, block_size, kv_heads,
    head_dim), contiguous. block_table: (num_reqs, max_blocks) int32. seq_lens: (num_reqs,)
    int32; rows of length 0 are left as they are. rel_logits: (num_reqs, heads, extent).
    """
    num_reqs, num_heads, head_dim = q.shape
    out = torch.empty((num_reqs, num_heads, head_dim), dtype=q.dtype)
    rel_strides = (0, 0) if rel_logits is None else rel_logits.stride()[:2]
    extent = 0 if rel_logits is None else rel_logits.shape[2]
    sizes = (ctypes.c_int64 * 12)(
        num_reqs,
        num_heads,
        k_cache.shape[2],
        head_dim,
        k_cache.shape[1],
        block_table.stride(0),
        q.stride(0),
        q.stride(1),
        *rel_strides,
        extent,
        window or 0,
    )
    cpu_kernels().vllm_paged_decode(
        DTYPES[q.dtype],
        out.data_ptr(),
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_table.data_ptr(),
        seq_lens.data_ptr(),
        None if rel_logits is None else rel_logits.data_ptr(),
        sizes,
        scale,
    )
    return out
