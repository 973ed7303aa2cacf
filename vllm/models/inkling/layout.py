# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of an Inkling checkpoint's tensors, in each spelling. Torch-free.

The original spelling (`model.llm.`) and transformers' vary independently of the
dialect of config.json; the names that are there decide. Preflight compares headers
with this table and the loader renames by it, so that the two cannot disagree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from vllm.models.inkling.configs import InklingConfig, parse_inkling_config

NVFP4_GROUP = 16
"""Values that share one NVFP4 scale."""

OPTIONAL = (
    "model.visual.",
    "model.vision_tower.",
    "model.audio.",
    "model.audio_tower.",
    "model.mtp.",
    ".input_amax",
    ".original_shape",
)
"""Tensors that may be present without being read: towers, draft head, calibration."""

# original name -> (transformers' names that make it up, in order). Two names stand for a
# matrix whose rows the original interleaves: gate 0, up 0, gate 1, up 1, ...
_LAYER_NAMES: dict[str, tuple[str, ...]] = {
    "attn_norm.weight": ("input_layernorm.weight",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
    "attn.wq_du.weight": ("self_attn.q_proj.weight",),
    "attn.wk_dv.weight": ("self_attn.k_proj.weight",),
    "attn.wv_dv.weight": ("self_attn.v_proj.weight",),
    "attn.wr_du.weight": ("self_attn.r_proj.weight",),
    "attn.wo_ud.weight": ("self_attn.o_proj.weight",),
    "attn.q_norm.weight": ("self_attn.q_norm.weight",),
    "attn.k_norm.weight": ("self_attn.k_norm.weight",),
    "attn.rel_logits_proj.proj": ("self_attn.rel_logits_proj.proj",),
    "attn.k_sconv.weight": ("self_attn.k_sconv.conv1d.weight",),
    "attn.v_sconv.weight": ("self_attn.v_sconv.conv1d.weight",),
    "attn_sconv.weight": ("attn_sconv.conv1d.weight",),
    "mlp_sconv.weight": ("mlp_sconv.conv1d.weight",),
    "mlp.w13_dn.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.w2_md.weight": ("mlp.down_proj.weight",),
    "mlp.global_scale": ("mlp.global_scale",),
    "mlp.gate.weight": ("mlp.gate.weight",),
    "mlp.gate.bias": ("mlp.gate.e_score_correction_bias",),
    "mlp.gate.global_scale": ("mlp.gate.global_scale",),
    "mlp.experts.w13_weight": ("mlp.experts.gate_up_proj",),
    "mlp.experts.w2_weight": ("mlp.experts.down_proj",),
    "mlp.shared_experts.shared_w13_weight": (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
    ),
    "mlp.shared_experts.shared_w2_weight": ("mlp.shared_experts.down_proj",),
}
_TOP_NAMES = {
    "embed.weight": "embed_tokens.weight",
    "embed_norm.weight": "embed_tokens.embed_norm.weight",
    "norm.weight": "norm.weight",
}
_OLD_EMBED_NORM = "embed_norm.weight"
"""How transformers spelt the embedding's norm before 5.23."""
_TRANSFORMERS_TEXT_PREFIXES = ("model.language_model.", "model.")


@dataclasses.dataclass(frozen=True)
class CanonicalName:
    """A checkpoint's tensor in the original spelling, without `model.llm.`."""

    name: str
    """Such as "layers.3.mlp.w13_dn.weight" or "mtp.layers.0.input_proj.weight"."""
    half: int | None = None
    """0 for the gate, 1 for the up part, where transformers stores them apart."""
    interleaved: bool = False
    """Whether rows of a gate-and-up matrix alternate (original) or follow each other."""


def canonical_name(name: str) -> CanonicalName | None:
    """Where a checkpoint's tensor belongs; None for towers and calibration values."""
    if name in ("model.llm.unembed.weight", "lm_head.weight"):
        return CanonicalName("unembed.weight")
    if name.startswith("model.llm."):
        return CanonicalName(name.removeprefix("model.llm."), interleaved=True)
    if name.startswith("model.mtp."):
        return CanonicalName(name.removeprefix("model."), interleaved=True)
    if name.startswith(OPTIONAL[:4]):
        return None
    for prefix in _TRANSFORMERS_TEXT_PREFIXES:
        if name.startswith(prefix):
            return _from_transformers(name.removeprefix(prefix))
    return None


def _from_transformers(name: str) -> CanonicalName | None:
    if name == _OLD_EMBED_NORM:
        return CanonicalName(name)
    if name in _TOP_NAMES.values():
        return CanonicalName(next(k for k, v in _TOP_NAMES.items() if v == name))
    if not name.startswith("layers."):
        return None
    _, index, inner = name.split(".", 2)
    found = _FROM_TRANSFORMERS.get(inner)
    if found is None:
        return None
    original, half = found
    return CanonicalName(f"layers.{index}.{original}", half)


_FROM_TRANSFORMERS = {
    part: (original, half if len(parts) > 1 else None)
    for original, parts in _LAYER_NAMES.items()
    for half, part in enumerate(parts)
}


def expected_tensors(
    hf_config: Mapping[str, Any], present: Collection[str], with_mtp: bool = False
) -> dict[str, tuple[int, ...]]:
    """Shapes by the names that this checkpoint spells its tensors with.

    `present` are the names in the headers: they decide the spelling, and which experts
    are packed as NVFP4. Raises `ConfigError` as `parse_inkling_config` does.
    """
    config = parse_inkling_config(hf_config)
    spell = _spelling(present)
    shapes: dict[str, tuple[int, ...]] = {}
    width = config.hidden_size
    for name, shape in (
        ("embed.weight", (config.vocab_size, width)),
        ("embed_norm.weight", (width,)),
        ("norm.weight", (width,)),
        ("unembed.weight", (config.vocab_size, width)),
    ):
        shapes.update(spell(name, shape))
    for index, (local, dense) in enumerate(zip(config.is_local, config.is_dense, strict=True)):
        for name, dims in _layer_shapes(config, local, dense).items():
            shapes.update(spell(f"layers.{index}.{name}", dims))
    if with_mtp:
        shapes.update(_mtp_shapes(config))
    return _packed(shapes, present)


def _spelling(present: Collection[str]):  # type: ignore[no-untyped-def]
    """A function from canonical name and shape to this checkpoint's names and shapes."""
    if any(n.startswith("model.llm.") for n in present):
        return lambda name, shape: {f"model.llm.{name}": shape}
    multimodal = any(n.startswith("model.language_model.") for n in present)
    prefix = _TRANSFORMERS_TEXT_PREFIXES[0 if multimodal else 1]

    def spell(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        if name == "unembed.weight":
            return {"lm_head.weight": shape}
        if name == _OLD_EMBED_NORM and prefix + name in present:
            return {prefix + name: shape}
        if name in _TOP_NAMES:
            return {prefix + _TOP_NAMES[name]: shape}
        _, index, inner = name.split(".", 2)
        parts = _LAYER_NAMES[inner]
        if len(parts) == 2:
            rows = len(shape) - 2
            shape = (*shape[:rows], shape[rows] // 2, *shape[rows + 1 :])
        return {f"{prefix}layers.{index}.{part}": shape for part in parts}

    return spell


def _layer_shapes(
    config: InklingConfig, is_local: bool, is_dense: bool
) -> dict[str, tuple[int, ...]]:
    heads = config.attention(is_local)
    width, taps = config.hidden_size, config.conv_taps
    queries = heads.num_heads * heads.head_dim
    keys = heads.num_kv_heads * heads.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (width,),
        "mlp_norm.weight": (width,),
        "attn.wq_du.weight": (queries, width),
        "attn.wk_dv.weight": (keys, width),
        "attn.wv_dv.weight": (keys, width),
        "attn.wr_du.weight": (heads.num_heads * config.d_rel, width),
        "attn.wo_ud.weight": (width, queries),
        "attn.q_norm.weight": (heads.head_dim,),
        "attn.k_norm.weight": (heads.head_dim,),
        "attn.rel_logits_proj.proj": (config.d_rel, heads.rel_extent),
        "attn.k_sconv.weight": (keys, 1, taps),
        "attn.v_sconv.weight": (keys, 1, taps),
        "attn_sconv.weight": (width, 1, taps),
        "mlp_sconv.weight": (width, 1, taps),
    }
    if is_dense:
        inner = config.dense_intermediate_size
        shapes["mlp.w13_dn.weight"] = (2 * inner, width)
        shapes["mlp.w2_md.weight"] = (width, inner)
        shapes["mlp.global_scale"] = (1,)
        return shapes
    routed, shared, inner = (
        config.num_experts,
        config.num_shared_experts,
        config.moe_intermediate_size,
    )
    shapes["mlp.gate.weight"] = (routed + shared, width)
    shapes["mlp.gate.bias"] = (routed,)
    shapes["mlp.gate.global_scale"] = (1,)
    shapes["mlp.experts.w13_weight"] = (routed, 2 * inner, width)
    shapes["mlp.experts.w2_weight"] = (routed, width, inner)
    shapes["mlp.shared_experts.shared_w13_weight"] = (shared, 2 * inner, width)
    shapes["mlp.shared_experts.shared_w2_weight"] = (shared, width, inner)
    return shapes


def _mtp_shapes(config: InklingConfig) -> dict[str, tuple[int, ...]]:
    width = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for depth, is_local in enumerate(config.mtp_is_local):
        prefix = f"model.mtp.layers.{depth}."
        shapes[prefix + "hidden_norm.weight"] = (width,)
        shapes[prefix + "embed_norm.weight"] = (width,)
        shapes[prefix + "input_proj.weight"] = (width, 2 * width)
        for name, shape in _layer_shapes(config, is_local, is_dense=True).items():
            shapes[f"{prefix}transformer_block.{name}"] = shape
    if config.mtp_is_local and config.mtp_chain_norm:
        shapes["model.mtp.chain_norm.weight"] = (width,)
    return shapes


def _packed(
    shapes: dict[str, tuple[int, ...]], present: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Experts that come with scales hold two values a byte."""
    result = {}
    for name, shape in shapes.items():
        if f"{name}.scale" not in present:
            result[name] = shape
            continue
        experts, rows, columns = shape
        result[name] = (experts, rows, columns // 2)
        result[f"{name}.scale"] = (experts, rows, columns // NVFP4_GROUP)
        result[f"{name}.scale2"] = (experts,)
    return result
