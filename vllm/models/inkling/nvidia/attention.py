# SPDX-License-Identifier: Apache-2.0
"""Inkling's attention on NVIDIA GPUs: the one constructor of backbone and draft head."""

from __future__ import annotations

import torch

from vllm.attention.metadata import ForwardContext
from vllm.layers.context import BuildContext
from vllm.models.inkling.common.attention import RelativeAttention
from vllm.models.inkling.configs import InklingConfig
from vllm.models.inkling.nvidia.ops.fa4_rel_attention import (
    check_inkling_fa4_support,
    fa4_rel_attention,
)


class InklingAttention(RelativeAttention):
    """`RelativeAttention` that refuses a GPU whose kernel cannot run, before anything else."""

    def __init__(
        self, ctx: BuildContext, config: InklingConfig, is_local: bool, layer_name: str
    ) -> None:
        # The front end has checked this already; a model built without it lands here.
        check_inkling_fa4_support(ctx.requested_backend if ctx else None)
        super().__init__(ctx, config, is_local, layer_name)
        self.uses_fa4 = ctx.attention_backend == "FLASH_ATTN"

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        fwd: ForwardContext,
        bias: torch.Tensor,
    ) -> torch.Tensor:
        """Prompts through FA4 where it is the backend; decoding through the split-KV kernel."""
        if not self.uses_fa4 or fwd.max_query_len == 1:
            return super().attend(q, k, v, fwd, bias)
        attn = self.attn
        group = fwd.groups[attn.group]
        attn.impl.store(attn, k, v, group)
        out = fa4_rel_attention(
            torch.empty_like(q),
            q,
            attn.k_cache,
            attn.v_cache,
            group.block_table,
            fwd.seq_lens,
            fwd.query_start_loc,
            fwd.max_query_len,
            fwd.max_seq_len,
            attn.scale,
            attn.window,
            bias.contiguous(),
        )
        return out.flatten(1)
