# SPDX-License-Identifier: Apache-2.0
"""Inkling's text model: the same on every platform but for the attention class.

Images and audio are refused at the door; their towers' weights are not loaded.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from vllm.attention.metadata import ForwardContext
from vllm.layers.context import BuildContext
from vllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.layers.linear import Linear
from vllm.layers.norm import RMSNorm
from vllm.models.inkling.common.attention import RelativeAttention, ShortConv
from vllm.models.inkling.common.moe import InklingMLP, InklingMoE
from vllm.models.inkling.common.short_conv import make_conv_plan
from vllm.models.inkling.common.weights import load_weights
from vllm.models.inkling.configs import InklingConfig, parse_inkling_config


def attention_class(device: torch.device) -> type[RelativeAttention]:
    """NVIDIA's has its own kernels and a check for them; the portable one serves the rest."""
    if device.type == "cuda" and torch.version.hip is None:
        from vllm.models.inkling.nvidia.attention import InklingAttention

        return InklingAttention
    return RelativeAttention


class InklingLayer(nn.Module):
    """One decoder layer, of the backbone or of the draft head."""

    def __init__(
        self,
        ctx: BuildContext,
        config: InklingConfig,
        is_local: bool,
        is_dense: bool,
        layer_name: str,
    ) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.taps = config.conv_taps
        self.conv_group = ctx.group_of(f"{layer_name}.conv")
        self.rows_per_block = ctx.groups[self.conv_group].rows_per_block
        self.attn_norm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.attn = attention_class(ctx.device)(ctx, config, is_local, layer_name)
        self.attn_conv = ShortConv(ctx, config.hidden_size, config.conv_taps, sharded=False)
        self.mlp_norm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.mlp: nn.Module = InklingMLP(ctx, config) if is_dense else InklingMoE(ctx, config)
        self.mlp_conv = ShortConv(ctx, config.hidden_size, config.conv_taps, sharded=False)

    def bind_kv_cache(self, caches: dict[str, tuple[torch.Tensor, ...]]) -> None:
        """Give each stream its columns of the layer's (blocks, rows, conv_width) cache."""
        cache = caches[f"{self.layer_name}.conv"][0]
        rows = cache.shape[1]
        assert self.rows_per_block in (None, rows)
        self.rows_per_block = rows
        convs = (self.attn.kv_conv, self.attn_conv, self.mlp_conv)
        widths = [conv.weight.shape[0] for conv in convs]
        for conv, columns in zip(convs, cache.flatten(0, 1).split(widths, -1), strict=True):
            conv.state = columns

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, fwd: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(num_tokens, hidden_size) and what is still to be added to it -> the same two."""
        assert self.rows_per_block is not None
        plan = make_conv_plan(fwd, self.conv_group, self.taps, self.rows_per_block)
        if residual is None:
            residual, x = x, self.attn_norm(x)
        else:
            x, residual = self.attn_norm(x, residual)
        x = self.attn_conv(self.attn(x, fwd, plan), plan)
        x, residual = self.mlp_norm(x, residual)
        return self.mlp_conv(self.mlp(x), plan), residual


class InklingMTPDepth(nn.Module):
    """One depth of the draft head: a dense decoder layer over token and hidden state together."""

    def __init__(self, ctx: BuildContext, config: InklingConfig, depth: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = RMSNorm(ctx, width, eps)
        self.embed_norm = RMSNorm(ctx, width, eps)
        self.input_proj = Linear(ctx, 2 * width, width)
        self.transformer_block = InklingLayer(
            ctx,
            config,
            config.mtp_is_local[depth],
            is_dense=True,
            layer_name=f"mtp.layers.{depth}.transformer_block",
        )

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, fwd: ForwardContext
    ) -> torch.Tensor:
        """Both (num_tokens, hidden_size) -> the same."""
        both = torch.cat([self.hidden_norm(hidden), self.embed_norm(embedded)], -1)
        x, residual = self.transformer_block(self.input_proj(both), None, fwd)
        return x + residual


class InklingMTPModel(nn.Module):
    """The draft head. Depth d reads the token d + 1 places ahead and the depth before it.

        h_-1 = the backbone's final-normed hidden state
        h_d[P] = block_d(W_in [rms(h_{d-1}[P]); rms(embed(id[P + 1 + d]))])

    and h_d through the backbone's head predicts id[P + 2 + d].
    """

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        config = parse_inkling_config(ctx.hf_config)
        self.layers = nn.ModuleList(
            InklingMTPDepth(ctx, config, depth) for depth in range(ctx.num_draft_tokens)
        )
        self.chain_norm = None
        if config.mtp_chain_norm:
            self.chain_norm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)

    def forward(
        self, depth: int, embedded: torch.Tensor, hidden: torch.Tensor, fwd: ForwardContext
    ) -> torch.Tensor:
        """One depth over all rows; embedded as `InklingForCausalLM.embed_tokens` gives it."""
        out = self.layers[depth](embedded, hidden, fwd)
        return out if self.chain_norm is None else self.chain_norm(out)


class InklingForCausalLM(nn.Module):
    """Embedding, layers, final norm and head."""

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config = parse_inkling_config(ctx.hf_config)
        self.embed = VocabParallelEmbedding(ctx, config.vocab_size, config.hidden_size)
        self.embed_norm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            InklingLayer(ctx, config, local, dense, f"layers.{i}")
            for i, (local, dense) in enumerate(zip(config.is_local, config.is_dense, strict=True))
        )
        self.norm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.unembed = ParallelLMHead(
            ctx, config.vocab_size, config.hidden_size, config.unpadded_vocab_size
        )
        self.mtp = InklingMTPModel(ctx) if ctx.num_draft_tokens else None

    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) ids -> (num_tokens, hidden_size), normed; the draft head shares it."""
        return self.embed_norm(self.embed(input_ids))

    def forward(self, input_ids: torch.Tensor, fwd: ForwardContext) -> torch.Tensor:
        """(num_tokens,) ids -> (num_tokens, hidden_size) after the final norm."""
        x = self.embed_tokens(input_ids)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, fwd)
        return self.norm(x, residual)[0]

    def draft(
        self, depth: int, input_ids: torch.Tensor, hidden: torch.Tensor, fwd: ForwardContext
    ) -> torch.Tensor:
        """Depth `depth` of the draft head over a step's rows.

        input_ids: (num_tokens,) the token depth + 1 places after each row. hidden: what the
        backbone, or the depth before, gave for the rows.
        """
        assert self.mtp is not None
        return self.mtp(depth, self.embed_tokens(input_ids), hidden, fwd)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(n, hidden_size) final-normed -> (n, unpadded_vocab_size)."""
        return self.unembed(hidden / self.config.mup_multiplier)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load either spelling; returns the names of the parameters that got a value."""
        return load_weights(self, weights)


class InklingForConditionalGeneration(InklingForCausalLM):
    """The multimodal checkpoint's text model."""
