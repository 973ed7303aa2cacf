# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts on a GPU: routing, tokens grouped by expert, two grouped matrix products.

Every expert's tokens are padded to whole tiles of BLOCK_M rows; a tile belongs to one expert.
The number of tiles is bounded by shapes alone, so that no count has to reach the host. One token
needs no tiles: its experts' matrices are multiplied with a vector.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.layers.ops.activation import silu_and_mul
from vllm.layers.ops.chips import dependent_launch

MAX_GROUPED_AT_ONCE = 1024
"""Assignments that one program puts in order; more of them are sorted by torch."""


@triton.jit
def route_softmax_kernel(
    weights_ptr,
    ids_ptr,
    logits_ptr,
    stride_logits,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One token a program: softmax over its experts, then the largest again and again."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    real = experts < NUM_EXPERTS
    source = logits_ptr + token * stride_logits + experts
    logits = tl.load(source, mask=real, other=float("-inf")).to(tl.float32)
    odds = tl.exp(logits - tl.max(logits, 0))
    total = tl.sum(odds, 0)
    left = tl.where(real, odds, -1.0)
    places = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.float32)
    ids = tl.zeros([BLOCK_K], tl.int32)
    for place in tl.static_range(TOP_K):
        largest = tl.max(left, 0)
        # Odds that are not numbers equal nothing; the id must name an expert all the same.
        expert = tl.min(tl.where(left == largest, experts, NUM_EXPERTS - 1), 0)
        chosen = tl.where(places == place, largest, chosen)
        ids = tl.where(places == place, expert, ids)
        left = tl.where(experts == expert, -1.0, left)
    if RENORMALIZE:
        total = tl.sum(chosen, 0)
    kept = places < TOP_K
    tl.store(weights_ptr + token * TOP_K + places, chosen / total, mask=kept)
    tl.store(ids_ptr + token * TOP_K + places, ids, mask=kept)


def route_softmax(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (num_tokens, top_k) float32 and int32 ids of the most probable experts.

    logits: (num_tokens, num_experts), last axis contiguous. Of equal ones the first is taken.
    """
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    if num_tokens:
        route_softmax_kernel[(num_tokens,)](
            weights,
            ids,
            logits,
            logits.stride(0),
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            RENORMALIZE=renormalize,
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_K=triton.next_power_of_2(top_k),
            num_warps=1,
            **dependent_launch(logits.device),
        )
    return weights, ids


@dataclasses.dataclass(frozen=True)
class Grouping:
    """Assignments (token times top_k) in the order of their experts."""

    rows: torch.Tensor
    """(num_tiles * block_m,) assignment of each row; num_assignments where it is padding."""
    experts: torch.Tensor
    """(num_tiles,) expert of each tile; -1 for a tile that nobody needs."""
    block_m: int


@triton.jit
def group_kernel(
    rows_ptr,
    experts_ptr,
    begins_ptr,
    ids_ptr,
    count,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """All assignments in one program. begins: (NUM_EXPERTS,) scratch, first tile of each expert."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    assignment = tl.arange(0, BLOCK_A)
    live = assignment < count
    expert = tl.load(ids_ptr + assignment, mask=live, other=0).to(tl.int32)
    bins = tl.arange(0, BLOCK_E)
    held = tl.zeros([BLOCK_E], tl.int32)
    rank = tl.zeros([BLOCK_A], tl.int32)  # assignments of the same expert before this one
    for start in range(0, count, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(ids_ptr + other, mask=other < count, other=-1).to(tl.int32)
        held += tl.sum((theirs[:, None] == bins[None, :]).to(tl.int32), 0)
        before = (expert[:, None] == theirs[None, :]) & (other[None, :] < assignment[:, None])
        rank += tl.sum(before.to(tl.int32), 1)
    tiles = (held + BLOCK_M - 1) // BLOCK_M
    begins = tl.cumsum(tiles, 0) - tiles
    tl.store(begins_ptr + bins, begins, mask=bins < NUM_EXPERTS)
    nobody = tl.full([BLOCK_A], 0, tl.int64) + count
    for start in range(0, num_tiles * BLOCK_M, BLOCK_A):
        row = start + assignment
        tl.store(rows_ptr + row, nobody, mask=row < num_tiles * BLOCK_M)
    for start in range(0, num_tiles, BLOCK_A):
        tile = start + assignment
        tl.store(experts_ptr + tile, -1, mask=tile < num_tiles)
    tl.debug_barrier()  # what was stored is read, and written over, by other threads
    place = tl.load(begins_ptr + expert, mask=live, other=0) * BLOCK_M + rank
    tl.store(rows_ptr + place, assignment.to(tl.int64), mask=live)
    for index in range(tl.max(tiles, 0)):
        tl.store(experts_ptr + begins + index, bins.to(tl.int64), mask=index < tiles)


def group_by_expert(ids: torch.Tensor, num_experts: int, block_m: int) -> Grouping:
    """Order the assignments of (num_tokens, top_k) expert ids by expert, padded to tiles."""
    count = ids.numel()
    num_tiles = min(count, num_experts) + count // block_m
    if count > MAX_GROUPED_AT_ONCE:
        return _sort_by_expert(ids, num_experts, block_m, num_tiles)
    rows = torch.empty(num_tiles * block_m, dtype=torch.int64, device=ids.device)
    experts = torch.empty(num_tiles, dtype=torch.int64, device=ids.device)
    group_kernel[(1,)](
        rows,
        experts,
        torch.empty(num_experts, dtype=torch.int32, device=ids.device),
        ids,
        count,
        num_tiles,
        NUM_EXPERTS=num_experts,
        BLOCK_M=block_m,
        BLOCK_A=max(16, triton.next_power_of_2(count)),
        BLOCK_E=triton.next_power_of_2(num_experts),
        CHUNK=16,
        num_warps=8 if count > 64 else 4,
        **dependent_launch(ids.device),
    )
    return Grouping(rows, experts, block_m)


def _sort_by_expert(ids: torch.Tensor, num_experts: int, block_m: int, num_tiles: int) -> Grouping:
    flat = ids.flatten().long()
    count = flat.numel()
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    tiles = (counts + block_m - 1) // block_m
    tile_ends = tiles.cumsum(0)
    first_row = (tile_ends - tiles) * block_m
    first_place = counts.cumsum(0) - counts
    rows = torch.full((num_tiles * block_m,), count, dtype=torch.int64, device=ids.device)
    sorted_ids = flat[order]
    places = torch.arange(count, device=ids.device) - first_place[sorted_ids]
    rows[first_row[sorted_ids] + places] = order
    index = torch.arange(num_tiles, device=ids.device)
    experts = torch.searchsorted(tile_ends, index, right=True)
    experts = torch.where(index < tile_ends[-1], experts, -1)
    return Grouping(rows, experts, block_m)


@triton.jit
def grouped_matmul_kernel(
    out_ptr,
    x_ptr,
    w_ptr,
    weights_ptr,
    rows_ptr,
    experts_ptr,
    num_assignments,
    stride_x,
    stride_expert,
    stride_w,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[a] = w[expert of a] x[a // TOP_K], times the assignment's weight if WEIGHTED."""
    tile = tl.program_id(1)
    expert = tl.load(experts_ptr + tile)
    if expert < 0:
        return
    assignment = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    live = assignment < num_assignments
    token = tl.where(live, assignment // TOP_K, 0)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    depth = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + token[:, None] * stride_x + depth[None, :]
    w_ptrs = w_ptr + expert * stride_expert + columns[None, :] * stride_w + depth[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        deep = start + depth < K
        x = tl.load(x_ptrs + start, mask=live[:, None] & deep[None, :], other=0.0)
        w = tl.load(w_ptrs + start, mask=inside[None, :] & deep[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if WEIGHTED:
        acc *= tl.load(weights_ptr + assignment, mask=live, other=0.0)[:, None]
    target = out_ptr + assignment[:, None] * N + columns[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


def _matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    grouping: Grouping,
    top_k: int,
    num_assignments: int,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """(num_assignments, N): each assignment's row of x through its expert's (N, K) matrix."""
    _, n, k = w.shape
    out = torch.empty((num_assignments, n), dtype=x.dtype, device=x.device)
    block_n, block_k = (128, 64) if x.element_size() == 2 else (64, 32)
    grid = (triton.cdiv(n, block_n), len(grouping.experts))
    grouped_matmul_kernel[grid](
        out,
        x,
        w,
        x if weights is None else weights,
        grouping.rows,
        grouping.experts,
        num_assignments,
        x.stride(0),
        w.stride(0),
        w.stride(1),
        N=n,
        K=k,
        TOP_K=top_k,
        WEIGHTED=weights is not None,
        BLOCK_M=grouping.block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=8 if grouping.block_m >= 64 else 4,
        num_stages=3,
    )
    return out


@triton.jit
def expert_vector_kernel(
    out_ptr,
    x_ptr,
    w_ptr,
    weights_ptr,
    ids_ptr,
    stride_x,
    stride_expert,
    N,
    K,
    WEIGHTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """BLOCK_N rows of the matrix of one assignment's expert, times that assignment's vector."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    assignment = tl.program_id(1)
    expert = tl.load(ids_ptr + assignment).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    depth = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + expert * stride_expert + rows[:, None] * K + depth[None, :]
    products = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        deep = start + depth < K
        w = tl.load(w_ptrs + start, mask=inside[:, None] & deep[None, :], other=0.0)
        x = tl.load(x_ptr + assignment * stride_x + start + depth, mask=deep, other=0.0)
        products += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(products, 1)
    if WEIGHTED:
        y *= tl.load(weights_ptr + assignment)
    tl.store(out_ptr + assignment * N + rows, y.to(out_ptr.dtype.element_ty), mask=inside)


def _expert_vectors(
    x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """(top_k, N): the (N, K) matrix of each chosen expert times its row of x, or the only one."""
    _, n, k = w.shape
    out = torch.empty((ids.numel(), n), dtype=x.dtype, device=x.device)
    block_n = 4
    expert_vector_kernel[(triton.cdiv(n, block_n), ids.numel())](
        out,
        x,
        w,
        x if weights is None else weights,
        ids,
        x.stride(0) if len(x) > 1 else 0,
        w.stride(0),
        n,
        k,
        WEIGHTED=weights is not None,
        BLOCK_N=block_n,
        BLOCK_K=min(1024, triton.next_power_of_2(k)),
        num_warps=4,
        **dependent_launch(x.device),
    )
    return out


def fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """sum over j of weights[t, j] * down(silu(gate x) * up x) of expert ids[t, j].

    x: (n, hidden). w13: (experts, 2 inner, hidden), gate above up. w2: (experts, hidden, inner).
    weights: (n, top_k) float32. ids: (n, top_k), dense. Returns (n, hidden).
    """
    num_tokens, top_k = ids.shape
    weights = weights.contiguous()
    if num_tokens == 1:
        inner = silu_and_mul(_expert_vectors(x, w13, ids))
        return _expert_vectors(inner, w2, ids, weights).sum(0, keepdim=True)
    count = num_tokens * top_k
    per_expert = count / w13.shape[0]
    block_m = 16 if per_expert <= 16 else 32 if per_expert <= 48 else 64
    if per_expert > 128:
        block_m = 128
    grouping = group_by_expert(ids, w13.shape[0], block_m)
    inner = silu_and_mul(_matmul(x, w13, grouping, top_k, count))
    out = _matmul(inner, w2, grouping, 1, count, weights.view(-1))
    return out.view(num_tokens, top_k, -1).sum(1)
