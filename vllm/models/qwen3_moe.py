# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: Qwen3's attention; most layers route each token to a few of many small MLPs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm.layers.context import BuildContext
from vllm.layers.linear import Linear
from vllm.layers.moe import DOWN, GATE, UP, FusedMoE, route_softmax
from vllm.layers.rotary import RotaryEmbedding
from vllm.models.decoder import CausalDecoder, DecoderLayer, DenseMLP
from vllm.models.layouts import is_sparse_layer, num_experts_of
from vllm.models.qwen3 import qwen3_attention

EXPERT_PARTS = {"gate_proj": GATE, "up_proj": UP, "down_proj": DOWN}


class Qwen3MoeBlock(nn.Module):
    """A softmax router and its experts."""

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        config = ctx.hf_config
        num_experts, hidden_size = num_experts_of(config), config["hidden_size"]
        self.top_k = config["num_experts_per_tok"]
        self.renormalize = bool(config.get("norm_topk_prob", False))
        self.gate = Linear(ctx, hidden_size, num_experts)
        self.experts = FusedMoE(ctx, num_experts, hidden_size, config["moe_intermediate_size"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) -> (num_tokens, hidden_size)."""
        weights, ids = route_softmax(self.gate(x), self.top_k, self.renormalize)
        return self.experts(x, weights, ids)


class Qwen3MoeForCausalLM(CausalDecoder):
    """Dense where config.json says so (`mlp_only_layers`, `decoder_sparse_step`)."""

    def __init__(self, ctx: BuildContext) -> None:
        def make_layer(index: int, rope: RotaryEmbedding) -> DecoderLayer:
            sparse = is_sparse_layer(ctx.hf_config, index)
            mlp = Qwen3MoeBlock(ctx) if sparse else DenseMLP(ctx)
            return DecoderLayer(ctx, qwen3_attention(ctx, index, rope), mlp)

        super().__init__(ctx, make_layer)

    def place(self, module: str) -> tuple[str, dict[str, Any]]:
        """As the base; `mlp.experts.7.up_proj` is expert 7's part of `mlp.experts`."""
        block, found, expert = module.partition(".experts.")
        if not found:
            return super().place(module)
        number, _, leaf = expert.partition(".")
        return f"{block}.experts", {"part": EXPERT_PARTS[leaf], "expert": int(number)}
