# SPDX-License-Identifier: Apache-2.0
"""Inkling's MLPs: dense, and a mixture of experts with a sigmoid router.

With z = x Wg^T in float32, R routed logits then S shared ones:

    chosen  = the K largest of sigmoid(z_routed) + bias      (the bias only chooses)
    a_j     = sigmoid(z_j) / sum sigmoid(z)                  over the K chosen and all S shared
    weights = a * route_scale * global_scale

so the shared experts, which see every token, take their share of one normalisation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm.layers.activation import silu_and_mul
from vllm.layers.context import BuildContext
from vllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.layers.moe import FusedMoE
from vllm.models.inkling.configs import InklingConfig


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    global_scale: torch.Tensor,
    route_scale: float,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of each token, both (num_tokens, K + S), the shared ones last.

    logits: (num_tokens, R + S) float32. bias: (R,). global_scale: (1,).
    """
    if logits.is_cuda:
        from vllm.models.inkling.common.ops.routing import route_sigmoid

        return route_sigmoid(logits, bias, global_scale, route_scale, top_k)
    num_experts = len(bias)
    chosen = (logits[:, :num_experts].sigmoid() + bias).topk(top_k, -1).indices
    shared = torch.arange(num_experts, logits.shape[1]).expand(len(logits), -1)
    ids = torch.cat([chosen, shared], 1)
    shares = F.logsigmoid(logits.gather(1, ids)).softmax(-1)
    return shares * (route_scale * global_scale), ids


class InklingMLP(nn.Module):
    """Dense gated MLP times one learned scalar."""

    def __init__(self, ctx: BuildContext, config: InklingConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.dense_intermediate_size
        self.gate_up = MergedColumnParallelLinear(ctx, width, [inner, inner])
        self.down = RowParallelLinear(ctx, inner, width)
        self.global_scale = nn.Parameter(torch.empty(1, dtype=ctx.dtype, device=ctx.device), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) -> the same."""
        return self.down(silu_and_mul(self.gate_up(x))) * self.global_scale


class InklingMoE(nn.Module):
    """Routed experts, and behind them the shared ones, which every token is routed to."""

    def __init__(self, ctx: BuildContext, config: InklingConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.route_scale = config.route_scale
        num_experts = config.num_experts + config.num_shared_experts
        exact: dict[str, Any] = {"dtype": torch.float32, "device": ctx.device}
        self.gate = nn.Parameter(torch.empty(num_experts, config.hidden_size, **exact), False)
        self.gate_bias = nn.Parameter(torch.empty(config.num_experts, **exact), False)
        self.global_scale = nn.Parameter(torch.empty(1, **exact), False)
        self.experts = FusedMoE(ctx, num_experts, config.hidden_size, config.moe_intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) -> the same."""
        logits = F.linear(x.float(), self.gate)
        weights, ids = route(
            logits, self.gate_bias, self.global_scale, self.route_scale, self.top_k
        )
        return self.experts(x, weights, ids)
