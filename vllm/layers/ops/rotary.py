# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of query and key heads in place, angles computed on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rotary_kernel(
    out_ptr,
    x_ptr,
    positions_ptr,
    inv_freq_ptr,
    factor,
    num_heads,
    stride_token,
    stride_head,
    out_stride_token,
    out_stride_head,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """BLOCK_HEADS heads of one token a program."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK_HALF)
    inside = columns < HALF
    live = (heads < num_heads)[:, None] & inside[None, :]
    position = tl.load(positions_ptr + token).to(tl.float32)
    angle = position * tl.load(inv_freq_ptr + columns, mask=inside, other=0.0)
    element = x_ptr.dtype.element_ty
    # cos and sin are rounded to the model's dtype, as the plain form's are.
    cos = (tl.cos(angle) * factor).to(element).to(tl.float32)
    sin = (tl.sin(angle) * factor).to(element).to(tl.float32)
    start = x_ptr + token * stride_token + heads[:, None] * stride_head + columns[None, :]
    left = tl.load(start, mask=live, other=0.0).to(tl.float32)
    right = tl.load(start + HALF, mask=live, other=0.0).to(tl.float32)
    target = out_ptr + token * out_stride_token + heads[:, None] * out_stride_head
    target += columns[None, :]
    tl.store(target, (left * cos - right * sin).to(element), mask=live)
    tl.store(target + HALF, (right * cos + left * sin).to(element), mask=live)


def apply_rotary(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, factor: float
) -> torch.Tensor:
    """Turn (num_tokens, heads, head_dim) by its positions; the last axis must be contiguous.

    positions: (num_tokens,). inv_freq: (head_dim / 2,) float32. The result is dense.
    """
    num_tokens, num_heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block_heads = min(8, triton.next_power_of_2(num_heads))
    rotary_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
        out,
        x,
        positions,
        inv_freq,
        factor,
        num_heads,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=block_heads,
        num_warps=2,
    )
    return out
