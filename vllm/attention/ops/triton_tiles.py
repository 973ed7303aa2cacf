# SPDX-License-Identifier: Apache-2.0
"""Device functions that the decode and the prefill kernel share: tiles of a paged cache, softmax.

All scores are kept in base 2: `qk_scale` is the caller's scale times log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

UNALIGNED = ["table_ptr", "seq_lens_ptr", "query_start_ptr"]
"""Arguments that may begin anywhere in a batch: no kernel is compiled anew for where they do."""


@triton.jit
def load_tile(
    cache_ptr,
    table_ptr,
    start,
    first_key,
    end_key,
    stride_block,
    stride_row,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    REVERSED: tl.constexpr = False,
):
    """Keys start..start+BLOCK_N-1 of one sequence and one KV head, (BLOCK_N, BLOCK_D).

    With REVERSED the last key comes first.

    With MASKED, keys outside [first_key, end_key) are zeros and are not read: their block
    may be freed, and whatever lies there (a NaN too) must not reach the product with V.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    if REVERSED:
        offs_n = BLOCK_N - 1 - offs_n
    keys = start + offs_n
    live = (keys >= first_key) & (keys < end_key)
    if PAGE % BLOCK_N == 0:
        # One block holds the whole tile: a scalar base and loop-invariant 32-bit offsets.
        page = tl.load(table_ptr + start // PAGE).to(tl.int64)
        base = cache_ptr + page * stride_block + (start % PAGE) * stride_row
        pointers = base + (offs_n[:, None] * stride_row + offs_d[None, :])
    else:
        if MASKED:
            page = tl.load(table_ptr + keys // PAGE, mask=live, other=0).to(tl.int64)
        else:
            page = tl.load(table_ptr + keys // PAGE).to(tl.int64)
        rows = page * stride_block + (keys % PAGE) * stride_row
        pointers = cache_ptr + rows[:, None] + offs_d[None, :]
    if MASKED:
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers, mask=live[:, None], other=0.0)
        return tl.load(pointers, mask=live[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    if HEAD_DIM == BLOCK_D:
        return tl.load(pointers)
    return tl.load(pointers, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def softmax_step(scores, row_max, row_sum, acc, MASKED: tl.constexpr):
    """One step of the online softmax: probabilities, and the state rescaled to the new maximum."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    reference = new_max
    if MASKED:
        # A row that sees no key yet must not compute inf - inf.
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    probs = tl.math.exp2(scores - reference[:, None])
    alpha = tl.math.exp2(row_max - reference)
    return probs, new_max, row_sum * alpha + tl.sum(probs, 1), acc * alpha[:, None]
