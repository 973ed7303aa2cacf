# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (arXiv 2104.09864) and the ways to stretch it to longer contexts.

A head's values x[i] and x[i + d/2] are turned by the angle position * inv_freq[i]:

    y[i]       = x[i] cos - x[i + d/2] sin
    y[i + d/2] = x[i + d/2] cos + x[i] sin

Only `inv_freq` and a factor on cos and sin differ between the types. Angles are made from
the step's positions, once a step for all layers: a table would take 64 MB for 131,072 positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm.attention.metadata import ForwardContext
from vllm.config.shape_readers import config_value
from vllm.layers.attention import Attention
from vllm.layers.context import BuildContext
from vllm.layers.ops import cpu

HeadNorms = tuple[torch.Tensor, torch.Tensor, float]
"""(head_dim,) weights of a query head's and a key head's RMS norm before the turn, and epsilon."""
InvFreq = tuple[torch.Tensor, float]
"""(head_dim / 2,) float32 turns in radians a position, and the factor on cos and sin."""


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by their positions; one instance serves all layers of a model."""

    def __init__(self, ctx: BuildContext, inv_freq: torch.Tensor, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.key = f"rotary.{id(self)}"
        self.inv_freq = nn.Buffer(inv_freq.to(ctx.device), persistent=False)

    def divide_frequencies(self, factors: torch.Tensor) -> None:
        """Apply (head_dim / 2,) divisors, as GGUF files carry Llama 3's scaling."""
        self.inv_freq.div_(factors.to(self.inv_freq))

    def cos_sin(self, fwd: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        """(num_tokens, head_dim / 2) float32 each, of the step's positions."""
        found = fwd.derived.get(self.key)
        if found is None:
            angles = fwd.positions[:, None] * self.inv_freq
            found = (angles.cos(), angles.sin())
            if self.factor != 1.0:
                found = (found[0] * self.factor, found[1] * self.factor)
            fwd.derived[self.key] = found
        return found

    def forward(self, x: torch.Tensor, fwd: ForwardContext) -> torch.Tensor:
        """Turn (num_tokens, heads, head_dim); the result is new."""
        cos, sin = (t[:, None] for t in self.cos_sin(fwd))
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)

    def turn_and_store(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        attn: Attention,
        fwd: ForwardContext,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """Turn queries and keys, write keys and values to the cache; one kernel where there is one.

        qk: (num_tokens, heads + kv_heads, head_dim), heads side by side. v: (num_tokens, kv_heads,
        head_dim). Returns the queries, dense.
        """
        group = fwd.groups[attn.group]
        if qk.is_cuda:
            from vllm.layers.ops.rotary import rotary_and_cache

            caches, angles = (attn.k_cache, attn.v_cache), (self.inv_freq, self.factor)
            return rotary_and_cache(
                qk, v, *caches, group.slot_mapping, fwd.positions, *angles, norms
            )
        if cpu.has_kernels(qk.dtype):
            slots = group.slot_mapping
            return cpu.rotary_and_cache(
                qk, v, attn.k_cache, attn.v_cache, slots, *self.cos_sin(fwd), norms
            )
        q, k = qk.split([attn.num_heads, attn.num_kv_heads], 1)
        if norms is not None:
            q_weight, k_weight, eps = norms
            q = F.rms_norm(q, q_weight.shape, q_weight, eps)
            k = F.rms_norm(k, k_weight.shape, k_weight, eps)
        attn.impl.store(attn, self(k, fwd), v, group)
        return self(q, fwd)


def rope_parameters(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and the type's own keys, from either spelling of config.json."""
    found = dict(hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {})
    found["rope_type"] = found.pop("rope_type", None) or found.pop("type", "default")
    found.setdefault("rope_theta", hf_config.get("rope_theta", 10000.0))
    found.setdefault("max_position_embeddings", hf_config.get("max_position_embeddings", 2048))
    return found


def get_rope(ctx: BuildContext, head_dim: int) -> RotaryEmbedding:
    """The rotary embedding that config.json asks for; ConfigError if its type is unknown."""
    parameters = rope_parameters(ctx.hf_config)
    make = _TYPES.get(parameters["rope_type"])
    if make is None:
        raise config_value("rope_type", parameters["rope_type"], f"supported: {', '.join(_TYPES)}")
    return RotaryEmbedding(ctx, *make(parameters, head_dim))


def _base(parameters: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / parameters["rope_theta"] ** exponents


def _default(parameters: Mapping[str, Any], head_dim: int) -> InvFreq:
    return _base(parameters, head_dim), 1.0


def _linear(parameters: Mapping[str, Any], head_dim: int) -> InvFreq:
    """Positions divided by `factor` (position interpolation, arXiv 2306.15595)."""
    return _base(parameters, head_dim) / parameters["factor"], 1.0


def _llama3(parameters: Mapping[str, Any], head_dim: int) -> InvFreq:
    """Low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1)."""
    inv_freq = _base(parameters, head_dim)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * (keep + (1 - keep) / parameters["factor"]), 1.0


def _yarn(parameters: Mapping[str, Any], head_dim: int) -> InvFreq:
    """Interpolation by frequency, and a temperature on the scores (arXiv 2309.00071)."""
    factor, theta = parameters["factor"], parameters["rope_theta"]
    original = parameters.get("original_max_position_embeddings")
    original = original or parameters["max_position_embeddings"]

    def dim_of(rotations: float) -> float:
        turns = math.log(original / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(theta))

    low, high = dim_of(parameters.get("beta_fast") or 32), dim_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    inv_freq = _base(parameters, head_dim)
    return inv_freq * (1 - ramp) + inv_freq / factor * ramp, _yarn_factor(parameters)


def _yarn_factor(parameters: Mapping[str, Any]) -> float:
    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(max(parameters["factor"], 1.0)) + 1.0

    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and all_dim:
        return temperature(mscale) / temperature(all_dim)
    return temperature(1.0)


_TYPES: dict[str, Callable[[Mapping[str, Any], int], InvFreq]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
