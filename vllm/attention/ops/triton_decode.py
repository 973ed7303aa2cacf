# SPDX-License-Identifier: Apache-2.0
"""Attention of few query tokens per sequence: reads K and V once, near the memory's rate.

Traffic: 2 * seq_len * num_kv_heads * head_dim elements a request, plus the bias within its
extent; everything else is small, so the kernel is bound by bandwidth and must only keep
enough bytes in flight on every multiprocessor.

The work is cut evenly whatever the lengths are: tiles of BLOCK_N keys of all (request, KV
head) pairs are numbered through, and each of a fixed number of programs takes an equal run
of that line. A tile with a bias takes NEAR_WEIGHT numbers, for the loop over such tiles starts
with empty buffers while other programs go on. Nothing depends on lengths known to the host, so
a CUDA graph stays right and balanced at any length. A pair that lies in one program is written
at once; of a pair cut between programs each writes its part (normalised sum, log-sum-exp) to
the workspace, at most two parts a program, and `combine_kernel` joins them. It also writes the
zeros of empty requests.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from vllm.attention.ops.triton_tiles import UNALIGNED, load_tile, softmax_step

NEAR_WEIGHT = tl.constexpr(3)


@triton.jit
def _far_tiles(
    seq_len, query_len, WINDOW: tl.constexpr, REL_EXTENT: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Tiles of a (request, KV head) pair before the first whose keys have a bias, and all tiles."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - query_len - WINDOW + 1, 0) // BLOCK_N
    tiles = (seq_len + BLOCK_N - 1) // BLOCK_N - first
    far = tiles
    if REL_EXTENT > 0:
        near = tl.maximum(seq_len - query_len - REL_EXTENT + 1, 0) // BLOCK_N
        far = tl.minimum(tl.maximum(near - first, 0), tiles)
    return far, tiles


@triton.jit
def _line_ends(
    seq_lens_ptr,
    query_start_ptr,
    num_reqs,
    num_kv_heads,
    WINDOW: tl.constexpr,
    REL_EXTENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Where each request ends on the line of all tiles, (BLOCK_B,); flat past the last."""
    index = tl.arange(0, BLOCK_B)
    real = index < num_reqs
    seq_len = tl.load(seq_lens_ptr + index, mask=real, other=0)
    query_start = tl.load(query_start_ptr + index, mask=real, other=0)
    query_len = tl.load(query_start_ptr + index + 1, mask=real, other=0) - query_start
    far, tiles = _far_tiles(seq_len, query_len, WINDOW, REL_EXTENT, BLOCK_N)
    length = tl.where(query_len > 0, far + (tiles - far) * NEAR_WEIGHT, 0)
    return tl.cumsum(length * num_kv_heads, 0)


@triton.jit
def _tile_at(place, far):
    """First tile of a pair that begins at or behind a place on the pair's part of the line."""
    return tl.where(place <= far, place, far + (place - far + NEAR_WEIGHT - 1) // NEAR_WEIGHT)


@triton.jit
def _share_of_line(length, num_programs, MIN_TILES: tl.constexpr):
    return tl.maximum((length + num_programs - 1) // num_programs, MIN_TILES)


@triton.jit
def _attend(
    acc,
    row_max,
    row_sum,
    q,
    query_pos,
    row_valid,
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
):
    """Online softmax over the keys of tiles begin..end-1; BIAS prefetches the next tile's."""
    LOG2E: tl.constexpr = 1.4426950408889634
    offs_n = tl.arange(0, BLOCK_N)
    if BIAS:
        distance = query_pos[:, None] - (begin * BLOCK_N + offs_n)[None, :]
        near = (distance >= 0) & (distance < REL_EXTENT) & row_valid[:, None]
        bias = tl.load(rel_ptrs[:, None] + distance, mask=near, other=0.0)
    for tile in range(begin, end):
        start = tile * BLOCK_N
        k = load_tile(
            k_ptr, table_ptr, start, first_key, end_key, stride_kb, stride_kn,
            HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, True,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
        distance = query_pos[:, None] - (start + offs_n)[None, :]
        if BIAS:
            scores += bias.to(tl.float32) * LOG2E
            ahead = distance - BLOCK_N
            near = (ahead >= 0) & (ahead < REL_EXTENT) & row_valid[:, None]
            bias = tl.load(rel_ptrs[:, None] + ahead, mask=near, other=0.0)
        seen = distance >= 0
        if WINDOW > 0:
            seen = seen & (distance < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        probs, row_max, row_sum, acc = softmax_step(scores, row_max, row_sum, acc, True)
        v = load_tile(
            v_ptr, table_ptr, start, first_key, end_key, stride_vb, stride_vn,
            HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, True,
        )  # fmt: skip
        acc = tl.dot(probs.to(v.dtype), v, acc, input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=UNALIGNED)
def decode_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
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
    MIN_TILES: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One run of tiles: walks the (request, KV head) pairs that it touches.

    WINDOW and REL_EXTENT of 0 mean none. Workspace: partial (programs, 2, BLOCK_M, BLOCK_D)
    and lse (programs, 2, BLOCK_M), float32; part 1 begins its pair, part 0 continues one.
    """
    if DEPENDENT:
        gdc_wait()
    program = tl.program_id(0)
    ends = _line_ends(
        seq_lens_ptr, query_start_ptr, num_reqs, num_kv_heads, WINDOW, REL_EXTENT, BLOCK_N, BLOCK_B
    )
    length = tl.max(ends, 0)
    share = _share_of_line(length, tl.num_programs(0), MIN_TILES)
    run_begin = program * share
    run_end = tl.minimum(run_begin + share, length)

    rows = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    in_head = offs_d < HEAD_DIM
    position = run_begin
    while position < run_end:
        req = tl.sum((ends <= position).to(tl.int32), 0)
        req_begin = tl.max(tl.where(ends <= position, ends, 0), 0)
        req_end = tl.min(tl.where(ends > position, ends, 2147483647), 0)
        pair_length = (req_end - req_begin) // num_kv_heads
        head = (position - req_begin) // pair_length
        pair_begin = req_begin + head * pair_length
        stop = tl.minimum(pair_begin + pair_length, run_end)

        seq_len = tl.load(seq_lens_ptr + req)
        query_start = tl.load(query_start_ptr + req)
        query_len = tl.load(query_start_ptr + req + 1) - query_start
        first_key = 0
        if WINDOW > 0:
            first_key = tl.maximum(seq_len - query_len - WINDOW + 1, 0)
        far, _ = _far_tiles(seq_len, query_len, WINDOW, REL_EXTENT, BLOCK_N)
        first_tile = first_key // BLOCK_N
        begin = first_tile + _tile_at(position - pair_begin, far)
        end = first_tile + _tile_at(stop - pair_begin, far)

        token = rows // GROUP
        row_valid = token < query_len
        query_pos = seq_len - query_len + token
        query_head = head * GROUP + rows % GROUP
        token_row = (query_start + token).to(tl.int64)
        row_mask = row_valid[:, None] & in_head[None, :]
        q_offsets = token_row * stride_qt + query_head * stride_qh
        q = tl.load(q_ptr + q_offsets[:, None] + offs_d[None, :], mask=row_mask, other=0.0)

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        k_head = k_ptr + head * stride_kh
        v_head = v_ptr + head * stride_vh
        table = table_ptr + req.to(tl.int64) * stride_table
        rel_ptrs = rel_ptr + token_row * stride_rt + query_head * stride_rh
        far_end = tl.minimum(tl.maximum(first_tile + far, begin), end)
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, query_pos, row_valid, k_head, v_head, table, rel_ptrs,
            begin, far_end, first_key, seq_len, qk_scale, stride_kb, stride_kn, stride_vb,
            stride_vn, WINDOW, REL_EXTENT, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, False,
        )  # fmt: skip
        if REL_EXTENT > 0:
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, query_pos, row_valid, k_head, v_head, table, rel_ptrs,
                far_end, end, first_key, seq_len, qk_scale, stride_kb, stride_kn, stride_vb,
                stride_vn, WINDOW, REL_EXTENT, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, True,
            )  # fmt: skip

        seen = row_sum > 0
        row_sum = tl.where(seen, row_sum, 1.0)
        acc = acc / row_sum[:, None]
        if stop - position == pair_length:
            o_offsets = token_row * stride_ot + query_head * stride_oh
            tl.store(out_ptr + o_offsets[:, None] + offs_d[None, :], acc, mask=row_mask)
        else:
            part = program * 2 + (position == pair_begin).to(tl.int32)
            lse = tl.where(seen, row_max + tl.math.log2(row_sum), float("-inf"))
            slot = part * BLOCK_M + rows
            tl.store(lse_ptr + slot, lse)
            tl.store(partial_ptr + slot[:, None] * BLOCK_D + offs_d[None, :], acc)
        position = stop


@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=UNALIGNED)
def combine_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    seq_lens_ptr,
    query_start_ptr,
    num_reqs,
    num_kv_heads,
    num_programs,
    stride_ot,
    stride_oh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    REL_EXTENT: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Joins the parts of a (request, KV head) pair; the grid's second axis strides over rows."""
    req = tl.program_id(0) // num_kv_heads
    head = tl.program_id(0) % num_kv_heads
    ends = _line_ends(
        seq_lens_ptr, query_start_ptr, num_reqs, num_kv_heads, WINDOW, REL_EXTENT, BLOCK_N, BLOCK_B
    )
    index = tl.arange(0, BLOCK_B)
    share = _share_of_line(tl.max(ends, 0), num_programs, MIN_TILES)
    req_begin = tl.max(tl.where(index < req, ends, 0), 0)
    req_end = tl.max(tl.where(index <= req, ends, 0), 0)
    pair_length = (req_end - req_begin) // num_kv_heads
    pair_begin = req_begin + head * pair_length
    first = pair_begin // share
    last = tl.where(pair_length > 0, (pair_begin + pair_length - 1) // share, first - 1)
    query_start = tl.load(query_start_ptr + req)
    num_rows = (tl.load(query_start_ptr + req + 1) - query_start) * GROUP
    if first == last:
        num_rows = 0  # one program held the whole pair and wrote it

    if DEPENDENT:  # launched while the parts are still being computed
        gdc_wait()
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_D)
    for row in range(tl.program_id(1), num_rows, tl.num_programs(1)):
        acc = tl.zeros([BLOCK_D], tl.float32)
        row_max = float("-inf")
        row_sum = 0.0
        for base in range(first, last + 1, BLOCK_S):
            program = base + offs_s
            real = program <= last
            begins = program * share <= pair_begin
            slot = (program * 2 + begins.to(tl.int32)) * BLOCK_M + row
            lse = tl.load(lse_ptr + slot, mask=real, other=float("-inf"))
            part = tl.load(
                partial_ptr + slot[:, None] * BLOCK_D + offs_d[None, :],
                mask=real[:, None],
                other=0.0,
            )
            new_max = tl.maximum(row_max, tl.max(lse, 0))
            reference = tl.where(new_max == float("-inf"), 0.0, new_max)
            weight = tl.math.exp2(lse - reference)
            alpha = tl.math.exp2(row_max - reference)
            acc = acc * alpha + tl.sum(part * weight[:, None], 0)
            row_sum = row_sum * alpha + tl.sum(weight, 0)
            row_max = new_max
        value = acc / tl.where(row_sum > 0, row_sum, 1.0)
        token = (query_start + row // GROUP).to(tl.int64)
        target = out_ptr + token * stride_ot + (head * GROUP + row % GROUP) * stride_oh
        tl.store(target + offs_d, value, mask=offs_d < HEAD_DIM)
