# SPDX-License-Identifier: Apache-2.0
"""Inkling's router on a GPU; the formula stands in common/moe.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.layers.ops.chips import dependent_launch
from vllm.layers.ops.routing import take_largest


@triton.jit
def route_sigmoid_kernel(
    weights_ptr,
    ids_ptr,
    logits_ptr,
    choice_bias_ptr,
    scale_ptr,
    stride_logits,
    route_scale,
    NUM_EXPERTS: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One token a program; the shared experts follow the chosen ones."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    real = experts < NUM_EXPERTS
    row = logits_ptr + token * stride_logits
    logits = tl.load(row + experts, mask=real, other=0.0).to(tl.float32)
    odds = tl.sigmoid(logits) + tl.load(choice_bias_ptr + experts, mask=real, other=0.0)
    odds = tl.where(real, odds, float("-inf"))
    ids, _ = take_largest(odds, NUM_EXPERTS, TOP_K, BLOCK_E, BLOCK_K)
    places = tl.arange(0, BLOCK_K)
    ids = tl.where(places < TOP_K, ids, NUM_EXPERTS + places - TOP_K)
    kept = places < TOP_K + NUM_SHARED
    z = tl.load(row + ids, mask=kept, other=0.0).to(tl.float32)
    log_sigmoid = tl.minimum(z, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(z)))
    log_sigmoid = tl.where(kept, log_sigmoid, float("-inf"))
    shares = tl.exp(log_sigmoid - tl.max(log_sigmoid, 0))
    weights = shares / tl.sum(shares, 0) * (route_scale * tl.load(scale_ptr))
    place = token * (TOP_K + NUM_SHARED) + places
    tl.store(weights_ptr + place, weights, mask=kept)
    tl.store(ids_ptr + place, ids, mask=kept)


def route_sigmoid(
    logits: torch.Tensor,
    bias: torch.Tensor,
    global_scale: torch.Tensor,
    route_scale: float,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `common.moe.route`; of equal odds the first expert is taken."""
    num_tokens, width = logits.shape
    num_experts = len(bias)
    chosen = top_k + width - num_experts
    weights = torch.empty((num_tokens, chosen), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_tokens, chosen), dtype=torch.int32, device=logits.device)
    if num_tokens:
        route_sigmoid_kernel[(num_tokens,)](
            weights,
            ids,
            logits,
            bias,
            global_scale,
            logits.stride(0),
            route_scale,
            NUM_EXPERTS=num_experts,
            NUM_SHARED=width - num_experts,
            TOP_K=top_k,
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_K=triton.next_power_of_2(chosen),
            num_warps=1,
            **dependent_launch(logits.device),
        )
    return weights, ids
