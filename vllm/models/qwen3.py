# SPDX-License-Identifier: Apache-2.0
"""Qwen3: each query and key head is normalised before the rotation."""

from __future__ import annotations

from vllm.layers.context import BuildContext
from vllm.layers.rotary import RotaryEmbedding
from vllm.models.decoder import CausalDecoder, DecoderAttention, DecoderLayer, DenseMLP


def qwen3_attention(ctx: BuildContext, index: int, rope: RotaryEmbedding) -> DecoderAttention:
    """Attention of dense and mixture-of-experts Qwen3 alike."""
    bias = bool(ctx.hf_config.get("attention_bias", False))
    return DecoderAttention(ctx, index, rope, qkv_bias=bias, output_bias=bias, head_norm=True)


class Qwen3ForCausalLM(CausalDecoder):
    """Dense Qwen3."""

    def __init__(self, ctx: BuildContext) -> None:
        def make_layer(index: int, rope: RotaryEmbedding) -> DecoderLayer:
            return DecoderLayer(ctx, qwen3_attention(ctx, index, rope), DenseMLP(ctx))

        super().__init__(ctx, make_layer)
