# SPDX-License-Identifier: Apache-2.0
"""Attention of long query runs (prefill chunks) over the paged cache: bound by the matrix units.

A program holds BLOCK_M rows, the tokens of one run times the query heads of one KV head, so
that short chunks fill a tile and keys are read once a group. It walks the keys in five
stretches that differ in what they must do a score: [left] only with a window, masked, with
bias; [far] nothing; [edge] bias where the extent ends; [near] bias; [right] the diagonal,
masked, with bias.

The bias of row m and key n is rel[token(m), head(m), pos(m) - n]: within a row the addresses
run backwards, one element a key. Tiles with bias therefore take their keys last first: then a
warp reads neighbouring elements in rising order, which the compiler loads as a block and passes
through shared memory. In the layout of the scores a load would touch eight rows at a time.
An element is read once and comes from memory, so its line is asked for AHEAD tiles before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm.attention.ops.triton_tiles import UNALIGNED, load_tile, softmax_step


@triton.jit
def _prefetch(pointers):
    """Ask for the cache lines at `pointers`; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _attend(
    acc,
    row_max,
    row_sum,
    q,
    query_pos,
    k_ptr,
    v_ptr,
    table_ptr,
    rel_ptrs,
    begin,
    end,
    first_key,
    end_key,
    qk_scale,
    stride_kb,
    stride_kn,
    stride_vb,
    stride_vn,
    WINDOW: tl.constexpr,
    REL_EXTENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BIAS: tl.constexpr,
    MASKED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Online softmax over the keys of tiles begin..end-1.

    BIAS: 0 none, 1 where the extent may end within a tile, 2 every score has one.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    REVERSED: tl.constexpr = BIAS > 0
    offs_n = tl.arange(0, BLOCK_N)
    for tile in range(begin, end):
        start = tile * BLOCK_N
        if REVERSED:
            distance = (query_pos - start - BLOCK_N + 1)[:, None] + offs_n[None, :]
        else:
            distance = query_pos[:, None] - (start + offs_n)[None, :]
        if BIAS > 0 and AHEAD > 0:
            coming = query_pos - start - (AHEAD + 1) * BLOCK_N + 1
            _prefetch(rel_ptrs + tl.minimum(tl.maximum(coming, 0), REL_EXTENT - 1))
        if BIAS == 2:  # asked for before the product, which takes as long as the load
            bias = tl.load(rel_ptrs[:, None] + distance)
        elif BIAS == 1:
            near = distance < REL_EXTENT
            if MASKED:
                near = near & (distance >= 0)
            bias = tl.load(rel_ptrs[:, None] + distance, mask=near, other=0.0)
        k = load_tile(
            k_ptr, table_ptr, start, first_key, end_key, stride_kb, stride_kn,
            HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, MASKED, REVERSED,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
        if BIAS > 0:
            scores += bias.to(tl.float32) * LOG2E
        if MASKED:
            seen = distance >= 0
            if WINDOW > 0:
                seen = seen & (distance < WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        probs, row_max, row_sum, acc = softmax_step(scores, row_max, row_sum, acc, MASKED)
        v = load_tile(
            v_ptr, table_ptr, start, first_key, end_key, stride_vb, stride_vn,
            HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, MASKED, REVERSED,
        )  # fmt: skip
        acc = tl.dot(probs.to(v.dtype), v, acc, input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=UNALIGNED)
def prefill_kernel(
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    rel_ptr,
    table_ptr,
    seq_lens_ptr,
    query_start_ptr,
    qk_scale,
    num_reqs,
    num_kv_heads,
    stride_ot,
    stride_oh,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_rt,
    stride_rh,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    REL_EXTENT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """One tile of query rows of one KV head. WINDOW and REL_EXTENT of 0 mean none.

    Request r owns the tile numbers from start(r) // BLOCK_Q + r on, a range that has room
    for its tiles whatever its alignment; numbers that are left over end at once.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    BIASED: tl.constexpr = 1 if REL_EXTENT > 0 else 0
    # The last tiles of a run see the most keys; they go first so that none is left alone.
    q_tile = tl.num_programs(0) // num_kv_heads - 1 - tl.program_id(0) // num_kv_heads
    head = tl.program_id(0) % num_kv_heads

    index = tl.arange(0, BLOCK_B)
    real = index < num_reqs
    origin = tl.load(query_start_ptr)
    starts = tl.load(query_start_ptr + index, mask=real, other=0) - origin
    req = tl.sum((real & (starts // BLOCK_Q + index <= q_tile)).to(tl.int32), 0) - 1
    query_start = tl.load(query_start_ptr + req)
    query_len = tl.load(query_start_ptr + req + 1) - query_start
    first_token = (q_tile - ((query_start - origin) // BLOCK_Q + req)) * BLOCK_Q
    if first_token >= query_len:
        return

    seq_len = tl.load(seq_lens_ptr + req)
    rows = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    token = first_token + rows // GROUP
    row_valid = (token < query_len) & (rows < BLOCK_Q * GROUP)
    token = tl.minimum(token, query_len - 1)
    query_pos = seq_len - query_len + token
    query_head = head * GROUP + rows % GROUP
    token_row = (query_start + token).to(tl.int64)
    row_mask = row_valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    q_offsets = token_row * stride_qt + query_head * stride_qh
    q = tl.load(q_ptr + q_offsets[:, None] + offs_d[None, :], mask=row_mask, other=0.0)
    rel_ptrs = rel_ptr + token_row * stride_rt + query_head * stride_rh

    first_pos = seq_len - query_len + first_token
    last_pos = tl.minimum(first_pos + BLOCK_Q, seq_len) - 1
    end = tl.where(seq_len > 0, last_pos // BLOCK_N + 1, 0)
    diagonal = tl.minimum((first_pos + 1) // BLOCK_N, end)
    first_key = 0
    begin = 0
    inside = 0
    if WINDOW > 0:
        first_key = tl.maximum(first_pos - WINDOW + 1, 0)
        begin = first_key // BLOCK_N
        # The first tile that even the last row sees whole.
        inside = (tl.maximum(last_pos - WINDOW + 1, 0) + BLOCK_N - 1) // BLOCK_N
        inside = tl.minimum(inside, end)
    diagonal = tl.maximum(diagonal, inside)
    edge = diagonal
    near = diagonal
    if REL_EXTENT > 0:
        edge = tl.maximum(first_pos - REL_EXTENT + 1, 0) // BLOCK_N
        edge = tl.minimum(tl.maximum(edge, inside), diagonal)
        # The first tile that even the last row sees within its extent.
        near = (tl.maximum(last_pos - REL_EXTENT + 1, 0) + BLOCK_N - 1) // BLOCK_N
        near = tl.minimum(tl.maximum(near, edge), diagonal)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    k_head = k_ptr + head * stride_kh
    v_head = v_ptr + head * stride_vh
    table = table_ptr + req.to(tl.int64) * stride_table
    if WINDOW > 0:
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, query_pos, k_head, v_head, table, rel_ptrs, begin, inside,
            first_key, seq_len, qk_scale, stride_kb, stride_kn, stride_vb, stride_vn,
            WINDOW, REL_EXTENT, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, BIASED, True, AHEAD,
        )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, query_pos, k_head, v_head, table, rel_ptrs, inside, edge,
        first_key, seq_len, qk_scale, stride_kb, stride_kn, stride_vb, stride_vn,
        WINDOW, REL_EXTENT, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, 0, False, AHEAD,
    )  # fmt: skip
    if REL_EXTENT > 0:
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, query_pos, k_head, v_head, table, rel_ptrs, edge, near,
            first_key, seq_len, qk_scale, stride_kb, stride_kn, stride_vb, stride_vn,
            WINDOW, REL_EXTENT, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, 1, False, AHEAD,
        )  # fmt: skip
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, query_pos, k_head, v_head, table, rel_ptrs, near, diagonal,
            first_key, seq_len, qk_scale, stride_kb, stride_kn, stride_vb, stride_vn,
            WINDOW, REL_EXTENT, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, 2, False, AHEAD,
        )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, query_pos, k_head, v_head, table, rel_ptrs, diagonal, end,
        first_key, seq_len, qk_scale, stride_kb, stride_kn, stride_vb, stride_vn,
        WINDOW, REL_EXTENT, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, BIASED, True, AHEAD,
    )  # fmt: skip

    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    o_offsets = token_row * stride_ot + query_head * stride_oh
    tl.store(out_ptr + o_offsets[:, None] + offs_d[None, :], acc, mask=row_mask)
