# SPDX-License-Identifier: Apache-2.0
"""The decoder that Llama and its relatives share: embedding, pre-norm layers, norm, head.

    h = h + attention(norm(h))
    h = h + mlp(norm(h))

A family's file says which attention and which MLP a layer has, and how the checkpoint
names its tensors. The residual is added inside the next norm, so that one pass over memory
does both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from vllm.attention.metadata import ForwardContext
from vllm.layers.activation import SiluAndMul
from vllm.layers.attention import Attention
from vllm.layers.context import BuildContext
from vllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.layers.norm import RMSNorm
from vllm.layers.rotary import HeadNorms, RotaryEmbedding, get_rope
from vllm.models.layouts import head_dim_of, num_kv_heads_of

# checkpoint's module -> (module that holds it, which part of it)
MERGED_MODULES = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class DecoderAttention(nn.Module):
    """Rotary self-attention over the paged cache, with optional biases and head norms."""

    def __init__(
        self,
        ctx: BuildContext,
        index: int,
        rope: RotaryEmbedding,
        qkv_bias: bool = False,
        output_bias: bool = False,
        head_norm: bool = False,
    ) -> None:
        """`head_norm`: normalise each query and key head before the rotation (Qwen3)."""
        super().__init__()
        config = ctx.hf_config
        self.head_dim = head_dim = head_dim_of(config)
        num_heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
        self.qkv_proj = QKVParallelLinear(
            ctx, hidden_size, head_dim, num_heads, num_kv_heads_of(config), qkv_bias
        )
        self.o_proj = RowParallelLinear(ctx, num_heads * head_dim, hidden_size, output_bias)
        self.rope = rope
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        name = f"layers.{index}.attn"
        window = ctx.groups[ctx.group_of(name)].window
        self.attn = Attention(
            ctx, name, self.num_heads, self.num_kv_heads, head_dim, head_dim**-0.5, window
        )
        self.head_norms: HeadNorms | None = None
        if head_norm:
            eps = rms_norm_eps(config)
            self.q_norm, self.k_norm = RMSNorm(ctx, head_dim, eps), RMSNorm(ctx, head_dim, eps)
            self.head_norms = (self.q_norm.weight, self.k_norm.weight, eps)

    def forward(self, x: torch.Tensor, fwd: ForwardContext) -> torch.Tensor:
        """(num_tokens, hidden_size) -> (num_tokens, hidden_size)."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        turned = self.num_heads + self.num_kv_heads
        qk, v = heads[:, :turned], heads[:, turned:]  # (num_tokens, heads, head_dim)
        q = self.rope.turn_and_store(qk, v, self.attn, fwd, self.head_norms)
        out = self.attn.attend(q, fwd)
        return self.o_proj(out.view(x.shape[0], -1))


class DenseMLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, ctx: BuildContext, bias: bool = False) -> None:
        super().__init__()
        hidden_size, inner = ctx.hf_config["hidden_size"], ctx.hf_config["intermediate_size"]
        self.gate_up_proj = MergedColumnParallelLinear(ctx, hidden_size, [inner, inner], bias)
        self.act = SiluAndMul()
        self.down_proj = RowParallelLinear(ctx, inner, hidden_size, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) -> (num_tokens, hidden_size)."""
        return self.down_proj(self.act(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm that first adds the residual."""

    def __init__(self, ctx: BuildContext, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        hidden_size, eps = ctx.hf_config["hidden_size"], rms_norm_eps(ctx.hf_config)
        self.input_layernorm = RMSNorm(ctx, hidden_size, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(ctx, hidden_size, eps)
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, fwd: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The MLP's output and the sum of everything before it, which the next norm adds."""
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, fwd)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


LayerFactory = Callable[[int, RotaryEmbedding], DecoderLayer]


class CausalDecoder(nn.Module):
    """A whole text model; families give it their layers."""

    def __init__(self, ctx: BuildContext, make_layer: LayerFactory) -> None:
        super().__init__()
        config = ctx.hf_config
        hidden_size, vocab_size = config["hidden_size"], config["vocab_size"]
        self.tied = bool(config.get("tie_word_embeddings", False))
        self.embed_tokens = VocabParallelEmbedding(ctx, vocab_size, hidden_size)
        self.rope = get_rope(ctx, head_dim_of(config))
        self.layers = nn.ModuleList(
            make_layer(i, self.rope) for i in range(config["num_hidden_layers"])
        )
        self.norm = RMSNorm(ctx, hidden_size, rms_norm_eps(config))
        self.lm_head = ParallelLMHead(ctx, vocab_size, hidden_size)
        if self.tied:
            self.lm_head.tie_to(self.embed_tokens)

    def forward(self, input_ids: torch.Tensor, fwd: ForwardContext) -> torch.Tensor:
        """(num_tokens,) ids -> (num_tokens, hidden_size), normalised."""
        x = self.embed_tokens(input_ids)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, fwd)
        return self.norm(x, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(n, hidden_size) -> (n, vocab_size)."""
        return self.lm_head(hidden)

    def place(self, module: str) -> tuple[str, dict[str, Any]]:
        """Our module for the checkpoint's, and what its `load` must know besides."""
        parent, _, leaf = module.rpartition(".")
        if leaf in MERGED_MODULES:
            merged, part = MERGED_MODULES[leaf]
            return f"{parent}.{merged}", {"part": part}
        return module, {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy checkpoint tensors into place; returns the parameters that got values.

        Tensors that no module takes are passed over.
        """
        modules = dict(self.named_modules())
        if self.tied:
            del modules["lm_head"]
        filled = set()
        for name, tensor in weights:
            module, _, kind = name.removeprefix("model.").rpartition(".")
            if module == "rope_freqs":
                self.rope.divide_frequencies(tensor)
                continue
            place, details = self.place(module)
            target: Any = modules.get(place)
            if takes(target, kind):
                target.load(kind, tensor, **details)
                filled.add(place)
        return {n for n, _ in self.named_parameters() if n.rpartition(".")[0] in filled}


def takes(module: Any, kind: str) -> bool:
    """Whether a module has a place for a checkpoint's "weight" or "bias"."""
    if not hasattr(module, "load"):
        return False
    return kind == "weight" or (kind == "bias" and getattr(module, "bias", None) is not None)


def rms_norm_eps(hf_config: dict[str, Any]) -> float:
    """Epsilon of the norms; transformers' default where config.json leaves it out."""
    return float(hf_config.get("rms_norm_eps", 1e-6))
