# SPDX-License-Identifier: Apache-2.0
"""Attention with FlashAttention 4 for prompts; decoding goes to the split-KV Triton kernel.

On Hopper FA4 cannot split a sequence's keys over multiprocessors, which costs it decoding:
2 to 92 % of the copy bandwidth against 87 to 99 % of the Triton kernel on long sequences.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from vllm.attention.backends.triton import TritonAttention
from vllm.attention.metadata import ForwardContext, GroupMetadata

if TYPE_CHECKING:
    from vllm.layers.attention import Attention

# FA4 hands CUTLASS an argument that its first call of every kernel complains of, without effect.
warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)


class FlashAttention(TritonAttention):
    """FLASH_ATTN."""

    def attend(
        self,
        layer: Attention,
        q: torch.Tensor,
        fwd: ForwardContext,
        group: GroupMetadata,
        rel_logits: torch.Tensor | None,
    ) -> torch.Tensor:
        """(num_tokens, heads, head_dim)."""
        if fwd.max_query_len == 1 or rel_logits is not None:
            return super().attend(layer, q, fwd, group, rel_logits)
        from flash_attn.cute.interface import flash_attn_varlen_func

        result = flash_attn_varlen_func(
            q,
            layer.k_cache,
            layer.v_cache,
            cu_seqlens_q=fwd.query_start_loc,
            # A few lengths only, so that few kernels are compiled.
            max_seqlen_q=1 << (fwd.max_query_len - 1).bit_length(),
            seqused_k=fwd.seq_lens,
            page_table=group.block_table,
            softmax_scale=layer.scale,
            causal=True,
            window_size=(None, None) if layer.window is None else (layer.window - 1, 0),
        )
        return result[0] if isinstance(result, tuple) else result
