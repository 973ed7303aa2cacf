# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from vllm.layers.context import BuildContext
from vllm.layers.rotary import RotaryEmbedding
from vllm.models.decoder import CausalDecoder, DecoderAttention, DecoderLayer, DenseMLP


class Qwen2ForCausalLM(CausalDecoder):
    """Dense Qwen2; the last layers may have a sliding window (`use_sliding_window`)."""

    def __init__(self, ctx: BuildContext) -> None:
        def make_layer(index: int, rope: RotaryEmbedding) -> DecoderLayer:
            attention = DecoderAttention(ctx, index, rope, qkv_bias=True)
            return DecoderLayer(ctx, attention, DenseMLP(ctx))

        super().__init__(ctx, make_layer)
