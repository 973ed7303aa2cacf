# SPDX-License-Identifier: Apache-2.0
"""config.json of the common decoder models, read into a `ModelShape`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config.shape import LayerShape, ModelShape
from vllm.errors import ConfigError, Diagnostic

MAX_LAYERS = 10_000
MAX_EXPERTS = 1 << 18
"""Of all layers together."""
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor",),
}
"""Rotary embeddings that layers/rotary.py has, and the numbers that each must be given."""


def read_decoder_shape(hf_config: Mapping[str, Any]) -> ModelShape:
    """Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Mixtral. Raises `ConfigError` naming the key."""
    hidden = _integer(hf_config, "hidden_size")
    heads = _integer(hf_config, "num_attention_heads")
    kv_heads = _integer(hf_config, "num_key_value_heads", heads)
    head_dim = _integer(hf_config, "head_dim", hidden // heads or 1)
    num_layers = _integer(hf_config, "num_hidden_layers", limit=MAX_LAYERS)
    if heads % kv_heads:
        raise config_value(
            "num_key_value_heads", kv_heads, f"it must divide num_attention_heads, {heads}"
        )
    experts = _num_experts(hf_config, num_layers)
    inner = _integer(hf_config, "intermediate_size")
    return ModelShape(
        hidden_size=hidden,
        vocab_size=_integer(hf_config, "vocab_size"),
        intermediate_size=inner,
        max_position_embeddings=max_positions(hf_config),
        layers=tuple(
            _layer(hf_config, index, num_layers, heads, kv_heads, head_dim, experts > 0)
            for index in range(num_layers)
        ),
        num_experts=experts,
        num_experts_per_tok=_integer(hf_config, "num_experts_per_tok", 1) if experts else 0,
        moe_intermediate_size=_expert_size(hf_config, inner) if experts else 0,
        tie_word_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
    )


def max_positions(hf_config: Mapping[str, Any]) -> int:
    """Context length that the model was made for; YaRN and linear scaling stretch it."""
    length = _integer(hf_config, "max_position_embeddings", 2048)
    scaling = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise config_value("rope_scaling", scaling, "it must be an object")
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind is not None and (not isinstance(kind, str) or kind not in ROPE_TYPES):
        raise config_value("rope_type", kind, f"supported: {', '.join(ROPE_TYPES)}")
    for key in ROPE_TYPES[kind or "default"]:
        value = scaling.get(key)
        if not isinstance(value, (int, float)) or value <= 0:
            raise config_value(key, value, f"rope_type {kind} needs a number above 0")
    factor = scaling.get("factor", 1.0)
    if kind not in ("linear", "yarn") or not isinstance(factor, (int, float)):
        return length
    original = scaling.get("original_max_position_embeddings")
    return int((original or length) * factor) if kind == "yarn" else int(length * factor)


def _layer(
    hf_config: Mapping[str, Any],
    index: int,
    num_layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    has_experts: bool,
) -> LayerShape:
    window = _window(hf_config, index, num_layers)
    return LayerShape(
        attention="sliding" if window else "full",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        window=window,
        is_moe=has_experts and _is_sparse(hf_config, index),
    )


def _window(hf_config: Mapping[str, Any], index: int, num_layers: int) -> int | None:
    window = hf_config.get("sliding_window")
    if window is None or hf_config.get("use_sliding_window") is False:
        return None
    if type(window) is not int or window < 1:
        raise config_value("sliding_window", window, "it must be a whole number above 0")
    kinds = hf_config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        return window if kinds[index] == "sliding_attention" else None
    if str(hf_config.get("model_type", "")).startswith("qwen"):
        # Qwen's default is off, and only layers from max_window_layers on have one.
        first = _integer(hf_config, "max_window_layers", 28, minimum=0)
        return window if hf_config.get("use_sliding_window") and index >= first else None
    return window


def _num_experts(hf_config: Mapping[str, Any], num_layers: int) -> int:
    for name in ("num_experts", "num_local_experts"):
        if hf_config.get(name) is not None:
            return _integer(hf_config, name, limit=MAX_EXPERTS // num_layers)
    return 0


def _expert_size(hf_config: Mapping[str, Any], inner: int) -> int:
    """Mixtral's experts have the size of a dense layer, Qwen3's say their own."""
    has_own = "Qwen3MoeForCausalLM" in (hf_config.get("architectures") or ())
    return _integer(hf_config, "moe_intermediate_size", None if has_own else inner)


def _is_sparse(hf_config: Mapping[str, Any], index: int) -> bool:
    step = _integer(hf_config, "decoder_sparse_step", 1)
    dense = hf_config.get("mlp_only_layers") or ()
    if not isinstance(dense, (list, tuple)):
        raise config_value("mlp_only_layers", dense, "it must list layer numbers")
    return index not in dense and (index + 1) % step == 0


def _integer(
    hf_config: Mapping[str, Any],
    name: str,
    default: int | None = None,
    minimum: int = 1,
    limit: int = 1 << 40,
) -> int:
    value = hf_config.get(name)
    if value is None:
        if default is None:
            raise ConfigError(
                Diagnostic(
                    "config-key-missing",
                    f"config.json has no {name}",
                    why="the model's sizes cannot be told without it",
                    fix="restore config.json from the model's repository",
                )
            )
        return default
    if type(value) is not int or not minimum <= value <= limit:
        raise config_value(name, value, f"it must be a whole number from {minimum} to {limit}")
    return value


def config_value(name: str, value: Any, why: str) -> ConfigError:
    """A key of config.json that holds what it cannot hold."""
    shown = repr(value)
    return ConfigError(
        Diagnostic(
            "config-value",
            f"config.json sets {name} to {shown if len(shown) < 80 else shown[:77] + '...'}",
            why=why,
            fix="check config.json against the model's page",
        )
    )
