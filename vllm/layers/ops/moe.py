# SPDX-License-Identifier: Apache-2.0
"""The experts on a GPU: two products each, the gate and the weighted sum in their kernels.

A few tokens have their experts' matrices multiplied with vectors; more of them are grouped
into tiles of one expert first.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.layers.ops.chips import dependent_launch, device_arch
from vllm.layers.ops.routing import Grouping, group_by_expert

MAX_VECTOR_TOKENS = 4
"""Tokens up to which each assignment is a product with a vector: most have an expert alone."""


@dataclasses.dataclass(frozen=True)
class ProductConfig:
    """Block sizes and launch options of one product."""

    block_n: int
    """Columns of the output a program computes."""
    block_k: int
    num_warps: int
    num_stages: int = 3


def tile_config(arch: str, block_m: int, itemsize: int, gated: bool) -> ProductConfig:
    """Configuration of a grouped product; a gated one holds two tiles of weights.

    Small tiles of tokens are bound by reading weights and take deep ones.
    """
    if itemsize == 4:
        return ProductConfig(32 if gated else 64, 32, 8 if block_m >= 64 else 4)
    if block_m >= 128:
        return ProductConfig(128 if arch == "sm_90" or not gated else 64, 64, 8)
    if block_m >= 64 or arch.startswith("gfx"):
        return ProductConfig(64 if gated else 128, 64, 4)
    return ProductConfig(32 if gated else 64, 128, 4)


def vector_config(gated: bool) -> ProductConfig:
    """Configuration of a product with vectors."""
    return ProductConfig(1, 512, 2) if gated else ProductConfig(4, 1024, 2)


@triton.jit(do_not_specialize=["num_assignments"])
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
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One tile of assignments times BLOCK_N columns of its expert's w.

    GATED: out[a] = silu(gate x[a // TOP_K]) * (up x[a // TOP_K]), w being gate above up.
    Else: out[a] = weights[a] * (w x[a]).
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(1)
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    assignment = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    live = assignment < num_assignments
    x_row = assignment // TOP_K if GATED else assignment
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    depth = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + x_row[:, None] * stride_x + depth[None, :]
    w_ptrs = w_ptr + expert * stride_expert + columns[None, :] * stride_w + depth[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        deep = start + depth < K
        mask = inside[None, :] & deep[:, None]
        x = tl.load(x_ptrs + start, mask=live[:, None] & deep[None, :], other=0.0)
        w = tl.load(w_ptrs + start, mask=mask, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        if GATED:
            w_up = tl.load(w_ptrs + N * stride_w + start, mask=mask, other=0.0)
            acc_up = tl.dot(x, w_up, acc_up, input_precision="ieee")
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    else:
        acc *= tl.load(weights_ptr + assignment, mask=live, other=0.0)[:, None]
    target = out_ptr + assignment[:, None] * N + columns[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


def grouped_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    grouping: Grouping,
    top_k: int,
    num_assignments: int,
    weights: torch.Tensor | None,
    config: ProductConfig,
) -> torch.Tensor:
    """(num_assignments, N): each one's row of x through its expert; gated if without weights."""
    gated = weights is None
    n = w.shape[1] // 2 if gated else w.shape[1]
    out = torch.empty((num_assignments, n), dtype=x.dtype, device=x.device)
    grouped_matmul_kernel[(triton.cdiv(n, config.block_n), len(grouping.experts))](
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
        K=w.shape[2],
        TOP_K=top_k,
        GATED=gated,
        BLOCK_M=grouping.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent_launch(x.device),
    )
    return out


@triton.jit
def gate_up_vector_kernel(
    out_ptr,
    x_ptr,
    w_ptr,
    ids_ptr,
    stride_x,
    stride_expert,
    N,
    K,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out[a] = silu(gate x) * (up x): BLOCK_N rows of both, of one assignment's expert."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    assignment = tl.program_id(0)  # first, so that those of one expert read its rows together
    expert = tl.load(ids_ptr + assignment).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    depth = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + expert * stride_expert + rows[:, None] * K + depth[None, :]
    x_ptrs = x_ptr + assignment // TOP_K * stride_x + depth
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        deep = start + depth < K
        mask = inside[:, None] & deep[None, :]
        x = tl.load(x_ptrs + start, mask=deep, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(w_ptrs + start, mask=mask, other=0.0).to(tl.float32) * x
        up += tl.load(w_ptrs + N * K + start, mask=mask, other=0.0).to(tl.float32) * x
    gated = tl.sum(gate, 1)
    gated = gated * tl.sigmoid(gated) * tl.sum(up, 1)
    tl.store(out_ptr + assignment * N + rows, gated.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def down_vector_kernel(
    out_ptr,
    x_ptr,
    w_ptr,
    weights_ptr,
    ids_ptr,
    stride_expert,
    N,
    K,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out[t] = sum over its assignments of weight * (w x): BLOCK_N rows of one token."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    depth = tl.arange(0, BLOCK_K)
    products = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for place in tl.static_range(TOP_K):
        assignment = token * TOP_K + place
        expert = tl.load(ids_ptr + assignment).to(tl.int64)
        weight = tl.load(weights_ptr + assignment)
        w_ptrs = w_ptr + expert * stride_expert + rows[:, None] * K + depth[None, :]
        for start in range(0, K, BLOCK_K):
            deep = start + depth < K
            x = tl.load(x_ptr + assignment * K + start + depth, mask=deep, other=0.0)
            w = tl.load(w_ptrs + start, mask=inside[:, None] & deep[None, :], other=0.0)
            products += w.to(tl.float32) * (x.to(tl.float32) * weight)[None, :]
    y = tl.sum(products, 1)
    tl.store(out_ptr + token * N + rows, y.to(out_ptr.dtype.element_ty), mask=inside)


def gate_up_vectors(
    x: torch.Tensor, w13: torch.Tensor, ids: torch.Tensor, config: ProductConfig
) -> torch.Tensor:
    """(num_tokens * top_k, inner): silu(gate x) * (up x) of each token's experts."""
    inner, k = w13.shape[1] // 2, w13.shape[2]
    out = torch.empty((ids.numel(), inner), dtype=x.dtype, device=x.device)
    gate_up_vector_kernel[(ids.numel(), triton.cdiv(inner, config.block_n))](
        out,
        x,
        w13,
        ids,
        x.stride(0),
        w13.stride(0),
        inner,
        k,
        TOP_K=ids.shape[1],
        BLOCK_N=config.block_n,
        BLOCK_K=min(config.block_k, triton.next_power_of_2(k)),
        num_warps=config.num_warps,
        **dependent_launch(x.device),
    )
    return out


def down_vectors(
    x: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    config: ProductConfig,
) -> torch.Tensor:
    """(num_tokens, hidden): weighted sum of the down products of each token's assignments."""
    num_tokens, top_k = ids.shape
    _, n, k = w2.shape
    out = torch.empty((num_tokens, n), dtype=x.dtype, device=x.device)
    down_vector_kernel[(num_tokens, triton.cdiv(n, config.block_n))](
        out,
        x,
        w2,
        weights,
        ids,
        w2.stride(0),
        n,
        k,
        TOP_K=top_k,
        BLOCK_N=config.block_n,
        BLOCK_K=min(config.block_k, triton.next_power_of_2(k)),
        num_warps=config.num_warps,
        **dependent_launch(x.device),
    )
    return out


def tile_rows(count: int, num_experts: int) -> int:
    """Rows of a tile for `count` assignments: about as many as an expert has on average."""
    per_expert = count / num_experts
    return 16 if per_expert <= 16 else 32 if per_expert <= 48 else 64 if per_expert <= 128 else 128


def fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """sum over j of weights[t, j] * down(silu(gate x) * up x) of expert ids[t, j].

    x: (n, hidden). w13: (experts, 2 inner, hidden), gate above up. w2: (experts, hidden, inner).
    weights: (n, top_k) float32, dense like ids: (n, top_k). Returns (n, hidden).
    """
    num_tokens, top_k = ids.shape
    if num_tokens <= MAX_VECTOR_TOKENS:
        inner = gate_up_vectors(x, w13, ids, vector_config(True))
        return down_vectors(inner, w2, weights, ids, vector_config(False))
    count = num_tokens * top_k
    grouping = group_by_expert(ids, w13.shape[0], tile_rows(count, w13.shape[0]))
    arch, rows, itemsize = device_arch(x.device), grouping.block_m, x.element_size()
    gate, down = (tile_config(arch, rows, itemsize, gated) for gated in (True, False))
    inner = grouped_matmul(x, w13, grouping, top_k, count, None, gate)
    out = grouped_matmul(inner, w2, grouping, top_k, count, weights, down)
    return out.view(num_tokens, top_k, -1).sum(1)
