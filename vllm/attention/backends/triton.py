# SPDX-License-Identifier: Apache-2.0
"""Attention with the portable Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.attention.metadata import ForwardContext, GroupMetadata
from vllm.attention.ops.triton_attention import paged_attention, workspace_elements

if TYPE_CHECKING:
    from vllm.layers.attention import Attention


class TritonAttention:
    """TRITON_ATTN. Layers run one after another, so one workspace a shape serves them all."""

    _workspaces: dict[tuple[torch.device, torch.dtype, int, int, int], torch.Tensor] = {}

    def store(
        self, layer: Attention, k: torch.Tensor, v: torch.Tensor, group: GroupMetadata
    ) -> None:
        """Write rows to their slots."""
        from vllm.layers.ops.cache import reshape_and_cache

        reshape_and_cache(k, v, layer.k_cache, layer.v_cache, group.slot_mapping)

    def attend(
        self,
        layer: Attention,
        q: torch.Tensor,
        fwd: ForwardContext,
        group: GroupMetadata,
        rel_logits: torch.Tensor | None,
    ) -> torch.Tensor:
        """(num_tokens, heads, head_dim)."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        paged_attention(
            out,
            q,
            layer.k_cache,
            layer.v_cache,
            group.block_table,
            fwd.seq_lens,
            fwd.query_start_loc,
            fwd.max_query_len,
            fwd.max_seq_len,
            layer.scale,
            layer.window,
            rel_logits,
            self._workspace(layer, q),
            fwd.num_decode_reqs,
        )
        return out

    def _workspace(self, layer: Attention, q: torch.Tensor) -> torch.Tensor:
        key = (q.device, q.dtype, layer.num_heads, layer.num_kv_heads, layer.head_dim)
        if key not in self._workspaces:
            self._workspaces[key] = torch.empty(
                workspace_elements(*key), dtype=torch.float32, device=q.device
            )
        return self._workspaces[key]
