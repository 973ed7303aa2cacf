# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: each token through its `top_k` gated MLPs, weighted and summed.

    out[t] = sum over chosen e of weight[t, e] * down_e(silu(gate_e x) * up_e x)

Every rank holds every expert, each divided like a dense MLP, so that ranks are loaded
equally whatever the router does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from vllm.layers.activation import silu_and_mul
from vllm.layers.context import BuildContext
from vllm.layers.linear import can_pack, new_parameter, pack_weight, packed_linear, shard

GATE, UP, DOWN = 0, 1, 2
"""Parts of an expert, as `FusedMoE.load` counts them."""


def route_softmax(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (num_tokens, top_k) float32 and ids of the most probable experts.

    With `renormalize` the weights of the chosen ones sum to 1.
    """
    if logits.is_cuda:
        from vllm.layers.ops import routing

        return routing.route_softmax(logits, top_k, renormalize)
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(top_k, -1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids


class FusedMoE(nn.Module):
    """The experts of a layer; routing is the caller's."""

    def __init__(
        self, ctx: BuildContext, num_experts: int, hidden_size: int, intermediate_size: int
    ) -> None:
        """`intermediate_size` is the whole expert's."""
        super().__init__()
        self.tp = ctx.tp
        self.num_experts = num_experts
        self.inner = inner = intermediate_size // ctx.tp.world_size
        self.w13 = new_parameter(ctx, num_experts, 2 * inner, hidden_size)
        self.w2 = new_parameter(ctx, num_experts, hidden_size, inner)
        self.packed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def load(self, kind: str, tensor: torch.Tensor, part: int, expert: int) -> None:
        """Copy this rank's rows (gate, up) or columns (down) of one expert's matrix."""
        assert kind == "weight"
        rank, world_size = self.tp.rank, self.tp.world_size
        if part == DOWN:
            self.w2[expert].copy_(shard(tensor, 1, rank, world_size))
        else:
            rows = self.w13[expert, part * self.inner : (part + 1) * self.inner]
            rows.copy_(shard(tensor, 0, rank, world_size))

    def process_weights_after_loading(self) -> None:
        """Pack each expert's matrices where that makes products faster."""
        if can_pack(self.w13.device, self.w13.dtype):
            pairs = zip(self.w13, self.w2, strict=True)
            self.packed = [(pack_weight(w13), pack_weight(w2)) for w13, w2 in pairs]
            for parameter in (self.w13, self.w2):
                parameter.data = parameter.data.new_empty(0)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size), equal on all ranks; weights and ids (num_tokens, top_k)."""
        if x.is_cuda:
            from vllm.layers.ops.moe import fused_experts

            out = fused_experts(x, self.w13, self.w2, weights, ids)
        else:
            out = self._grouped(x, weights, ids)
        return out if self.tp.world_size == 1 else self.tp.all_reduce(out)

    def _grouped(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert, one pair of products an expert that has any."""
        top_k = ids.shape[1]
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=self.num_experts).tolist()
        rows = x[order // top_k]
        parts = []
        start = 0
        for expert, count in enumerate(counts):
            if count:
                parts.append(self._expert(rows[start : start + count], expert))
                start += count
        outputs = torch.empty_like(rows)
        outputs[order] = torch.cat(parts)
        # (num_tokens, top_k, hidden_size), summed in the router's order whatever the batch is
        outputs = outputs.unflatten(0, (-1, top_k)) * weights[..., None].to(x.dtype)
        return outputs.sum(1)

    def _expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        if self.packed:
            w13, w2 = self.packed[expert]
            return packed_linear(silu_and_mul(packed_linear(x, w13)), w2)
        return F.linear(silu_and_mul(F.linear(x, self.w13[expert])), self.w2[expert])
