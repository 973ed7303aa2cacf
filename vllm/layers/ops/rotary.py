# SPDX-License-Identifier: Apache-2.0
"""Query and key heads normalised where the model does that, and turned by their positions.

Angles are computed on the way; keys and values go into their pages.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.layers.ops.chips import dependent_launch


@triton.jit
def rotary_and_cache_kernel(
    out_ptr,
    qk_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    positions_ptr,
    inv_freq_ptr,
    q_weight_ptr,
    k_weight_ptr,
    factor,
    eps,
    qk_stride_token,
    qk_stride_head,
    v_stride_token,
    v_stride_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """BLOCK_HEADS heads of one token a program: all queries, all keys or all values."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_HEADS
    heads = first + tl.arange(0, BLOCK_HEADS)[:, None]
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    live = (columns < HALF) & (heads >= 0)
    slot = tl.load(slots_ptr + token)
    row = slot * (NUM_KV_HEADS * 2 * HALF)
    if first >= NUM_HEADS + NUM_KV_HEADS:
        if slot >= 0:
            head = heads - (NUM_HEADS + NUM_KV_HEADS)
            source = v_ptr + token * v_stride_token + head * v_stride_head + columns
            target = v_cache_ptr + row + head * (2 * HALF) + columns
            tl.store(target, tl.load(source, mask=live, other=0.0), mask=live)
            tl.store(target + HALF, tl.load(source + HALF, mask=live, other=0.0), mask=live)
        return
    position = tl.load(positions_ptr + token).to(tl.float32)
    angle = position * tl.load(inv_freq_ptr + columns, mask=columns < HALF, other=0.0)
    element = qk_ptr.dtype.element_ty
    cos = (tl.cos(angle) * factor).to(element).to(tl.float32)
    sin = (tl.sin(angle) * factor).to(element).to(tl.float32)
    source = qk_ptr + token * qk_stride_token + heads * qk_stride_head + columns
    left = tl.load(source, mask=live, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=live, other=0.0).to(tl.float32)
    if HAS_NORMS:
        weight_ptr = q_weight_ptr if first < NUM_HEADS else k_weight_ptr
        squares = tl.sum(left * left + right * right, 1)
        inverse = tl.math.rsqrt(squares / (2 * HALF) + eps)[:, None]
        inside = columns < HALF
        left *= inverse * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        weight_ptr += HALF
        right *= inverse * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    turned_left = (left * cos - right * sin).to(element)
    turned_right = (right * cos + left * sin).to(element)
    if first < NUM_HEADS:
        target = out_ptr + (token * NUM_HEADS + heads) * (2 * HALF) + columns
        tl.store(target, turned_left, mask=live)
        tl.store(target + HALF, turned_right, mask=live)
    elif slot >= 0:
        target = k_cache_ptr + row + (heads - NUM_HEADS) * (2 * HALF) + columns
        tl.store(target, turned_left, mask=live)
        tl.store(target + HALF, turned_right, mask=live)


def rotary_and_cache(
    qk: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    factor: float,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """Turn queries and keys, store keys and values; returns the queries, dense.

    qk: (num_tokens, heads + kv_heads, head_dim). v: (num_tokens, kv_heads, head_dim). Caches:
    (blocks, page, kv_heads, head_dim), contiguous. slot_mapping: (num_tokens,), -1 leaves a
    token out. norms: (head_dim,) weights of a query's and a key's RMS norm before the turn, and
    epsilon. The last axis of qk and v must be contiguous.
    """
    num_tokens, num_kv_heads, head_dim = v.shape
    num_heads = qk.shape[1] - num_kv_heads
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=qk.dtype, device=qk.device)
    if num_tokens == 0:
        return out
    q_weight, k_weight, eps = norms or (inv_freq, inv_freq, 0.0)
    # A program's heads are all of one kind.
    block_heads = math.gcd(math.gcd(num_heads, num_kv_heads), 8)
    rotary_and_cache_kernel[(num_tokens, (num_heads + 2 * num_kv_heads) // block_heads)](
        out,
        qk,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        positions,
        inv_freq,
        q_weight,
        k_weight,
        factor,
        eps,
        qk.stride(0),
        qk.stride(1),
        v.stride(0),
        v.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=block_heads,
        HAS_NORMS=norms is not None,
        num_warps=2,
        **dependent_launch(qk.device),
    )
    return out
