# SPDX-License-Identifier: Apache-2.0
"""Mixtral: Mistral's attention, every MLP a mixture of two experts out of eight."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm.layers.context import BuildContext
from vllm.layers.linear import Linear
from vllm.layers.moe import DOWN, GATE, UP, FusedMoE, route_softmax
from vllm.layers.rotary import RotaryEmbedding
from vllm.models.decoder import CausalDecoder, DecoderAttention, DecoderLayer
from vllm.models.layouts import num_experts_of

EXPERT_PARTS = {"w1": GATE, "w3": UP, "w2": DOWN}


class MixtralBlock(nn.Module):
    """A softmax router whose chosen weights sum to 1, and its experts."""

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        config = ctx.hf_config
        num_experts, hidden_size = num_experts_of(config), config["hidden_size"]
        self.top_k = config["num_experts_per_tok"]
        self.gate = Linear(ctx, hidden_size, num_experts)
        self.experts = FusedMoE(ctx, num_experts, hidden_size, config["intermediate_size"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) -> (num_tokens, hidden_size)."""
        weights, ids = route_softmax(self.gate(x), self.top_k, renormalize=True)
        return self.experts(x, weights, ids)


class MixtralForCausalLM(CausalDecoder):
    """The checkpoint calls the block `block_sparse_moe` and its matrices w1, w2, w3."""

    def __init__(self, ctx: BuildContext) -> None:
        def make_layer(index: int, rope: RotaryEmbedding) -> DecoderLayer:
            return DecoderLayer(ctx, DecoderAttention(ctx, index, rope), MixtralBlock(ctx))

        super().__init__(ctx, make_layer)

    def place(self, module: str) -> tuple[str, dict[str, Any]]:
        """As the base; `block_sparse_moe.experts.7.w3` is expert 7's up part of `mlp.experts`."""
        module = module.replace("block_sparse_moe", "mlp")
        block, found, expert = module.partition(".experts.")
        if not found:
            return super().place(module)
        number, _, leaf = expert.partition(".")
        return f"{block}.experts", {"part": EXPERT_PARTS[leaf], "expert": int(number)}
