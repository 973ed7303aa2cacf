# SPDX-License-Identifier: Apache-2.0
"""Routing on a GPU: each token's experts, and the tokens of each expert in tiles.

Every expert's tokens are padded to whole tiles of BLOCK_M rows; a tile belongs to one expert.
The number of tiles is bounded by shapes alone, so that no count has to reach the host.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.layers.ops.chips import dependent_launch


@triton.jit
def take_largest(
    odds,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Ids and odds of the TOP_K largest, the first of equal ones; odds: (BLOCK_E,), -inf beyond."""
    experts = tl.arange(0, BLOCK_E)
    places = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.float32)
    ids = tl.zeros([BLOCK_K], tl.int32)
    for place in tl.static_range(TOP_K):
        largest = tl.max(odds, 0)
        # Odds that are not numbers equal nothing; the id must name an expert all the same.
        expert = tl.min(tl.where(odds == largest, experts, NUM_EXPERTS - 1), 0)
        chosen = tl.where(places == place, largest, chosen)
        ids = tl.where(places == place, expert, ids)
        odds = tl.where(experts == expert, float("-inf"), odds)
    return ids, chosen


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
    ids, chosen = take_largest(
        tl.where(real, odds, float("-inf")), NUM_EXPERTS, TOP_K, BLOCK_E, BLOCK_K
    )
    places = tl.arange(0, BLOCK_K)
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
    """Assignments (token times top_k) in the order of their experts, ascending within one."""

    rows: torch.Tensor
    """(num_tiles * block_m,) int32 assignment of each row; num_assignments if it is padding."""
    experts: torch.Tensor
    """(num_tiles,) int32 expert of each tile; -1 for a tile that nobody needs."""
    block_m: int


@triton.jit(do_not_specialize=["count", "num_tiles"])
def group_kernel(
    rows_ptr,
    experts_ptr,
    ids_ptr,
    count,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_E: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One expert a program, each counting all; program NUM_EXPERTS marks what nobody needs."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    mine = tl.program_id(0)
    lane = tl.arange(0, BLOCK_A)
    bins = tl.arange(0, BLOCK_E)
    held = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, count, BLOCK_A):
        inside = start + lane < count
        expert = tl.load(ids_ptr + start + lane, mask=inside, other=NUM_EXPERTS)
        held += tl.histogram(expert.to(tl.int32), BLOCK_E)
    tiles = (held + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < mine, tiles, 0), 0)
    if mine == NUM_EXPERTS:
        for start in range(first * BLOCK_M, num_tiles * BLOCK_M, BLOCK_A):
            tl.store(rows_ptr + start + lane, count, mask=start + lane < num_tiles * BLOCK_M)
        for start in range(first, num_tiles, BLOCK_A):
            tl.store(experts_ptr + start + lane, -1, mask=start + lane < num_tiles)
        return
    place = first * BLOCK_M
    for start in range(0, count, BLOCK_A):
        inside = start + lane < count
        expert = tl.load(ids_ptr + start + lane, mask=inside, other=NUM_EXPERTS)
        chosen = (expert == mine).to(tl.int32)
        row = place + tl.cumsum(chosen, 0) - 1
        tl.store(rows_ptr + row, start + lane, mask=chosen > 0)
        place += tl.sum(chosen, 0)
    last = first + tl.sum(tl.where(bins == mine, tiles, 0), 0)
    padding = place + tl.arange(0, BLOCK_M)
    tl.store(rows_ptr + padding, count, mask=padding < last * BLOCK_M)
    for start in range(first, last, BLOCK_A):
        tl.store(experts_ptr + start + lane, mine, mask=start + lane < last)


def group_by_expert(ids: torch.Tensor, num_experts: int, block_m: int) -> Grouping:
    """Order the assignments of dense (num_tokens, top_k) expert ids, padded to tiles."""
    count = ids.numel()
    num_tiles = min(count, num_experts) + count // block_m
    rows = torch.empty(num_tiles * block_m, dtype=torch.int32, device=ids.device)
    experts = torch.empty(num_tiles, dtype=torch.int32, device=ids.device)
    large = count > 512
    group_kernel[(num_experts + 1,)](
        rows,
        experts,
        ids,
        count,
        num_tiles,
        NUM_EXPERTS=num_experts,
        BLOCK_M=block_m,
        BLOCK_A=4096 if large else 512,
        BLOCK_E=triton.next_power_of_2(num_experts + 1),
        num_warps=8 if large else 4,
        **dependent_launch(ids.device),
    )
    return Grouping(rows, experts, block_m)
