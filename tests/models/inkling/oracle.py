# SPDX-License-Identifier: Apache-2.0
"""Inkling's draft head in plain float32 torch, without a cache, from the written description.

Takes a checkpoint's tensors under their original names. Shares nothing with the engine.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def short_conv(u: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """u (T, C), weight (C, 1, k): causal, depthwise, with its own residual."""
    taps = weight.shape[-1]
    padded = F.pad(u.T[None], (taps - 1, 0))
    return u + F.conv1d(padded, weight, groups=u.shape[1])[0].T


def attention(
    x: torch.Tensor, w: Tensors, prefix: str, config: Any, is_local: bool
) -> torch.Tensor:
    kind = "swa_" if is_local else ""
    heads = config[f"{kind}num_attention_heads"]
    kv_heads, dim = config[f"{kind}num_key_value_heads"], config[f"{kind}head_dim"]
    length, group = len(x), heads // kv_heads
    q = rms(
        (x @ w[prefix + "wq_du.weight"].T).view(length, heads, dim), w[prefix + "q_norm.weight"]
    )
    k = short_conv(x @ w[prefix + "wk_dv.weight"].T, w[prefix + "k_sconv.weight"])
    k = rms(k.view(length, kv_heads, dim), w[prefix + "k_norm.weight"])
    v = short_conv(x @ w[prefix + "wv_dv.weight"].T, w[prefix + "v_sconv.weight"])
    v = v.view(length, kv_heads, dim)
    r = (x @ w[prefix + "wr_du.weight"].T).view(length, heads, config["d_rel"])
    bias = r @ w[prefix + "rel_logits_proj.proj"]  # (T, heads, extent)
    positions = torch.arange(length)
    if not is_local:
        ratio = ((positions + 1) / config["log_scaling_n_floor"]).clamp(min=1)
        tau = 1 + config["log_scaling_alpha"] * ratio.log()
        q, bias = q * tau[:, None, None], bias * tau[:, None, None]
    distance = positions[:, None] - positions
    extent = bias.shape[-1]
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) / dim
    index = distance.clamp(0, extent - 1).expand(heads, -1, -1)
    added = bias.transpose(0, 1).gather(-1, index)
    scores = scores + torch.where((distance >= 0) & (distance < extent), added, 0.0)
    seen = distance >= 0
    if is_local:
        seen &= distance < config["sliding_window_size"]
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    out = torch.einsum("hts,shd->thd", weights, v.repeat_interleave(group, 1))
    return out.flatten(1) @ w[prefix + "wo_ud.weight"].T


def dense_layer(
    x: torch.Tensor, w: Tensors, prefix: str, config: Any, is_local: bool
) -> torch.Tensor:
    a = attention(rms(x, w[prefix + "attn_norm.weight"]), w, prefix + "attn.", config, is_local)
    x = x + short_conv(a, w[prefix + "attn_sconv.weight"])
    y = rms(x, w[prefix + "mlp_norm.weight"])
    w13 = w[prefix + "mlp.w13_dn.weight"]
    inner = F.silu(y @ w13[0::2].T) * (y @ w13[1::2].T)
    m = w[prefix + "mlp.global_scale"] * (inner @ w[prefix + "mlp.w2_md.weight"].T)
    return x + short_conv(m, w[prefix + "mlp_sconv.weight"])


def drafts(w: Tensors, config: Any, hidden: torch.Tensor, ids: list[int], count: int) -> list[int]:
    """Tokens that `count` depths draft after `ids`, the last of which was just sampled.

    hidden: (len(ids) - 1, H) the backbone's final-normed states of all but the last token.
    """
    ids, rows = list(ids), len(hidden)
    drafted = []
    for depth in range(count):
        prefix = f"model.mtp.layers.{depth}."
        embedded = w["model.llm.embed.weight"][torch.tensor(ids[1 + depth : 1 + depth + rows])]
        e = rms(rms(embedded, w["model.llm.embed_norm.weight"]), w[prefix + "embed_norm.weight"])
        both = torch.cat([rms(hidden, w[prefix + "hidden_norm.weight"]), e], -1)
        is_local = depth in config["mtp_config"]["local_layer_ids"]
        u = both @ w[prefix + "input_proj.weight"].T
        hidden = dense_layer(u, w, prefix + "transformer_block.", config, is_local)
        hidden = rms(hidden, w["model.mtp.chain_norm.weight"])
        logits = (
            hidden[-1] / config["logits_mup_width_multiplier"] @ w["model.llm.unembed.weight"].T
        )
        drafted.append(int(logits[: config["unpadded_vocab_size"]].argmax()))
        ids.append(drafted[-1])
    return drafted
