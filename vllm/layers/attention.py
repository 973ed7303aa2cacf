# SPDX-License-Identifier: Apache-2.0
"""A layer's attention over the paged cache; the backend does the work."""

from __future__ import annotations

import torch
from torch import nn

from vllm.attention.backends import get_attention_impl
from vllm.attention.metadata import ForwardContext
from vllm.layers.context import BuildContext


class Attention(nn.Module):
    """Stores this step's keys and values, then attends. Heads are those of this rank."""

    def __init__(
        self,
        ctx: BuildContext,
        layer_name: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.group = ctx.group_of(layer_name)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.window = window
        self.impl = get_attention_impl(ctx.attention_backend)
        self.k_cache = self.v_cache = self.k_rows = self.v_rows = torch.empty(0)

    def bind_kv_cache(self, caches: dict[str, tuple[torch.Tensor, ...]]) -> None:
        """Take this layer's (num_blocks, block_size, num_kv_heads, head_dim) caches."""
        self.k_cache, self.v_cache = caches[self.layer_name]
        self.k_rows, self.v_rows = self.k_cache.flatten(0, 1), self.v_cache.flatten(0, 1)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        fwd: ForwardContext,
        rel_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q (num_tokens, heads, head_dim), k and v (num_tokens, kv_heads, head_dim) -> like q.

        rel_logits: (num_tokens, heads, extent), added to the scores of the last `extent` keys.
        """
        self.impl.store(self, k, v, fwd.groups[self.group])
        return self.attend(q, fwd, rel_logits)

    def attend(
        self, q: torch.Tensor, fwd: ForwardContext, rel_logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Like `forward`, for keys and values that are stored already."""
        return self.impl.attend(self, q, fwd, fwd.groups[self.group], rel_logits)
