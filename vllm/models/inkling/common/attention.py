# SPDX-License-Identifier: Apache-2.0
"""Inkling's attention block: convolved keys and values, a learned bias by distance.

For x (T, H), with the heads of the layer's kind (local or global):

    q = x Wq, k = SC_k(x Wk), v = SC_v(x Wv), r = x Wr          SC: common/short_conv.py
    q = rms(q), k = rms(k)                                      per head
    B[t, h, e] = sum_d r[t, h, d] P[d, e]                       bias at distance e
    score = q k / head_dim + B[t, h, t - s]                     no bias beyond the extent

Global layers stretch q and B by tau = 1 + alpha ln(max((t + 1) / n_floor, 1)), so that far
positions stay sharp. There is no rotary embedding.
"""

from __future__ import annotations

import torch
from torch import nn

from vllm.attention.metadata import ForwardContext
from vllm.layers.attention import Attention
from vllm.layers.context import BuildContext
from vllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear, shard
from vllm.layers.norm import RMSNorm
from vllm.models.inkling.common.short_conv import ConvPlan, short_conv
from vllm.models.inkling.configs import InklingConfig


class ShortConv(nn.Module):
    """The taps of one stream; its state is columns of the layer's convolution cache."""

    def __init__(self, ctx: BuildContext, channels: int, taps: int, sharded: bool) -> None:
        """`channels` are this rank's. Taps stay float32, as in the reference."""
        super().__init__()
        self.tp = ctx.tp if sharded else None
        self.weight = nn.Parameter(
            torch.empty(channels, taps, dtype=torch.float32, device=ctx.device), False
        )
        self.state = torch.empty(0)

    def load(self, kind: str, tensor: torch.Tensor, part: int | None = None) -> None:
        """Copy this rank's channels of a (channels, 1, taps) weight, or of one of two halves."""
        assert kind == "weight"
        if self.tp is not None:
            tensor = shard(tensor, 0, self.tp.rank, self.tp.world_size)
        target = self.weight if part is None else self.weight.chunk(2)[part]
        target.copy_(tensor[:, 0])

    def forward(self, u: torch.Tensor, plan: ConvPlan) -> torch.Tensor:
        """(num_tokens, channels) -> the same; this step's inputs are stored."""
        return short_conv(u, self.weight, self.state, plan)


class RelativeAttention(nn.Module):
    """One layer's attention, up to and including the output projection."""

    def __init__(
        self, ctx: BuildContext, config: InklingConfig, is_local: bool, layer_name: str
    ) -> None:
        super().__init__()
        heads = config.attention(is_local)
        world_size = ctx.tp.world_size
        self.num_heads = heads.num_heads // world_size
        self.num_kv_heads = heads.num_kv_heads // world_size
        self.head_dim = heads.head_dim
        self.d_rel = config.d_rel
        self.log_scaling = None if is_local else config.log_scaling_n_floor
        self.log_scaling_alpha = config.log_scaling_alpha
        queries = heads.num_heads * heads.head_dim
        keys = heads.num_kv_heads * heads.head_dim
        self.qkvr = MergedColumnParallelLinear(
            ctx, config.hidden_size, [queries, keys, keys, heads.num_heads * config.d_rel]
        )
        # Keys and values lie beside each other, so their two streams are convolved as one.
        kv_width = 2 * self.num_kv_heads * heads.head_dim
        self.kv_conv = ShortConv(ctx, kv_width, config.conv_taps, sharded=True)
        self.q_norm = RMSNorm(ctx, heads.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(ctx, heads.head_dim, config.rms_norm_eps)
        self.rel_proj = nn.Parameter(
            torch.empty(config.d_rel, heads.rel_extent, dtype=ctx.dtype, device=ctx.device), False
        )
        self.attn = Attention(
            ctx,
            f"{layer_name}.attn",
            self.num_heads,
            self.num_kv_heads,
            heads.head_dim,
            1.0 / heads.head_dim,
            heads.window,
        )
        self.out = RowParallelLinear(ctx, queries, config.hidden_size)

    def forward(self, x: torch.Tensor, fwd: ForwardContext, plan: ConvPlan) -> torch.Tensor:
        """(num_tokens, hidden_size) -> the same, before the output's own convolution."""
        queries, keys, values, rel = self.qkvr.part_sizes
        q, kv, r = self.qkvr(x).split([queries, keys + values, rel], -1)
        kv = self.kv_conv(kv, plan).unflatten(-1, (2 * self.num_kv_heads, self.head_dim))
        k, v = kv.chunk(2, 1)
        q = self.q_norm(q.unflatten(-1, (self.num_heads, self.head_dim)))
        k = self.k_norm(k)
        bias = r.unflatten(-1, (self.num_heads, self.d_rel)) @ self.rel_proj
        if self.log_scaling is not None:
            tau = self._log_scale(fwd)
            q, bias = q * tau, bias * tau
        return self.out(self.attend(q, k, v, fwd, bias))

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        fwd: ForwardContext,
        bias: torch.Tensor,
    ) -> torch.Tensor:
        """Store k and v, attend; (num_tokens, heads * head_dim)."""
        return self.attn(q, k, v, fwd, rel_logits=bias).flatten(1)

    def _log_scale(self, fwd: ForwardContext) -> torch.Tensor:
        """(num_tokens, 1, 1) in the activations' dtype; one tensor for all layers of a step."""
        if "log_scale" not in fwd.derived:
            assert self.log_scaling is not None
            ratio = ((fwd.positions + 1).float() / self.log_scaling).clamp(min=1)
            tau = 1 + self.log_scaling_alpha * ratio.log()
            fwd.derived["log_scale"] = tau[:, None, None].to(self.rel_proj.dtype)
        return fwd.derived["log_scale"]
