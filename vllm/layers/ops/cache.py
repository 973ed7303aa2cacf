# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a step into their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def reshape_and_cache_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token a program; ROW = heads * HEAD_DIM values of K and of V."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    offsets = tl.arange(0, BLOCK)
    live = offsets < ROW
    head, column = offsets // HEAD_DIM, offsets % HEAD_DIM
    k = tl.load(k_ptr + token * k_stride_token + head * k_stride_head + column, mask=live)
    v = tl.load(v_ptr + token * v_stride_token + head * v_stride_head + column, mask=live)
    tl.store(k_cache_ptr + slot * ROW + offsets, k, mask=live)
    tl.store(v_cache_ptr + slot * ROW + offsets, v, mask=live)


def reshape_and_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write (num_tokens, kv_heads, head_dim) rows into (blocks, page, kv_heads, head_dim) caches.

    slot_mapping: (num_tokens,) block * page + row; -1 leaves a token out.
    """
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    row = num_heads * head_dim
    block = triton.next_power_of_2(row)
    reshape_and_cache_kernel[(num_tokens,)](
        k_cache,
        v_cache,
        k,
        v,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        HEAD_DIM=head_dim,
        ROW=row,
        BLOCK=block,
        num_warps=min(8, max(1, block // 256)),
    )
