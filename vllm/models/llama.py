# SPDX-License-Identifier: Apache-2.0
"""Llama 2 and 3, SmolLM2, and Mistral, which adds a sliding window."""

from __future__ import annotations

from vllm.layers.context import BuildContext
from vllm.layers.rotary import RotaryEmbedding
from vllm.models.decoder import CausalDecoder, DecoderAttention, DecoderLayer, DenseMLP


class LlamaForCausalLM(CausalDecoder):
    """Grouped-query attention and a SwiGLU MLP; biases where config.json asks for them."""

    def __init__(self, ctx: BuildContext) -> None:
        attention_bias = bool(ctx.hf_config.get("attention_bias", False))
        mlp_bias = bool(ctx.hf_config.get("mlp_bias", False))

        def make_layer(index: int, rope: RotaryEmbedding) -> DecoderLayer:
            attention = DecoderAttention(
                ctx, index, rope, qkv_bias=attention_bias, output_bias=attention_bias
            )
            return DecoderLayer(ctx, attention, DenseMLP(ctx, mlp_bias))

        super().__init__(ctx, make_layer)
