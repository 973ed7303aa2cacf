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
    scale: torch.Tensor,
    top_k: int,
    num_shared: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Experts and weights of each token.

    logits: (num_tokens, R + S) float32. bias: (R,). scale: () route_scale * global_scale.
    Returns (num_tokens, K) expert ids, their weights, and the (num_tokens, S) weights of
    the shared experts.
    """
    routed = logits[:, :-num_shared]
    ids = (routed.sigmoid() + bias).topk(top_k, -1).indices
    both = torch.cat([routed.gather(1, ids), logits[:, -num_shared:]], 1)
    log_sigmoid = F.logsigmoid(both)
    weights = (log_sigmoid - log_sigmoid.logsumexp(-1, keepdim=True)).exp() * scale
    return ids, weights[:, :top_k], weights[:, top_k:]


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
    """Routed experts and the shared ones, which are one wide MLP with a weight per expert."""

    column_expert: torch.Tensor

    def __init__(self, ctx: BuildContext, config: InklingConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.moe_intermediate_size
        self.top_k = config.num_experts_per_tok
        self.num_shared = config.num_shared_experts
        self.route_scale = config.route_scale
        wide = self.num_shared * inner
        exact: dict[str, Any] = {"dtype": torch.float32, "device": ctx.device}
        self.gate = nn.Parameter(
            torch.empty(config.num_experts + self.num_shared, width, **exact), False
        )
        self.gate_bias = nn.Parameter(torch.empty(config.num_experts, **exact), False)
        self.global_scale = nn.Parameter(torch.empty(1, **exact), False)
        self.experts = FusedMoE(ctx, config.num_experts, width, inner)
        self.shared_gate_up = MergedColumnParallelLinear(ctx, width, [wide, wide])
        self.shared_down = RowParallelLinear(ctx, wide, width)
        columns = wide // ctx.tp.world_size
        first = ctx.tp.rank * columns
        owner = torch.arange(first, first + columns, device=ctx.device) // inner
        self.register_buffer("column_expert", owner, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) -> the same."""
        logits = F.linear(x.float(), self.gate)
        scale = self.route_scale * self.global_scale
        ids, weights, shared = route(logits, self.gate_bias, scale, self.top_k, self.num_shared)
        inner = silu_and_mul(self.shared_gate_up(x)) * shared[:, self.column_expert].to(x.dtype)
        routed = self.experts(x, weights, ids)
        return (routed.float() + self.shared_down(inner).float()).to(x.dtype)
