# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts on a GPU: tokens grouped by expert, two grouped matrix products.

Every expert's tokens are padded to whole tiles of BLOCK_M rows; a tile belongs to one expert.
The number of tiles is bounded by shapes alone, so that no count has to reach the host.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from vllm.layers.ops.activation import silu_and_mul


@dataclasses.dataclass(frozen=True)
class Grouping:
    """Assignments (token times top_k) in the order of their experts."""

    rows: torch.Tensor
    """(num_tiles * block_m,) assignment of each row; num_assignments where it is padding."""
    experts: torch.Tensor
    """(num_tiles,) expert of each tile; -1 for a tile that nobody needs."""
    block_m: int


def group_by_expert(ids: torch.Tensor, num_experts: int, block_m: int) -> Grouping:
    """Order the assignments of (num_tokens, top_k) expert ids by expert, padded to tiles."""
    flat = ids.flatten().long()
    count = flat.numel()
    num_tiles = min(count, num_experts) + count // block_m
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


def fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """sum over j of weights[t, j] * down(silu(gate x) * up x) of expert ids[t, j].

    x: (n, hidden). w13: (experts, 2 inner, hidden), gate above up. w2: (experts, hidden, inner).
    weights: (n, top_k) float32. ids: (n, top_k). Returns (n, hidden).
    """
    num_tokens, top_k = ids.shape
    count = num_tokens * top_k
    per_expert = count / w13.shape[0]
    block_m = 16 if per_expert <= 16 else 32 if per_expert <= 48 else 64
    if per_expert > 128:
        block_m = 128
    grouping = group_by_expert(ids, w13.shape[0], block_m)
    inner = silu_and_mul(_matmul(x, w13, grouping, top_k, count))
    out = _matmul(inner, w2, grouping, 1, count, weights.float().contiguous().view(-1))
    return out.view(num_tokens, top_k, -1).sum(1)
