# SPDX-License-Identifier: Apache-2.0
"""Inkling's config.json in both dialects, read into one record. Torch-free.

The public checkpoints use the *original* field names, `save_pretrained` of
transformers its own; some names mean different things (`intermediate_size` is
the width of one expert in the original, of the dense MLP in transformers).
`dense_intermediate_size` is only in the original and tells them apart. Weight
names vary independently of the dialect, so nothing here speaks of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vllm.config.shape import LayerShape, ModelShape
from vllm.errors import ConfigError, Diagnostic

FILE = "config.json"
MAX_LAYERS = 10_000

# Switches that the released models set one way; another value is another model.
_FIXED = {
    "q_bias": False,
    "o_bias": False,
    "use_embed_norm": True,
    "use_sconv": True,
    "use_gate_bias": True,
    "gate_activation": "sigmoid",
    "norm_after_topk": True,
    "use_global_scale": True,
    "shared_expert_sink": True,
    "final_logit_softcapping": None,
    "hidden_act": "silu",
}


@dataclasses.dataclass(frozen=True)
class InklingAttentionShape:
    """Heads of one kind of layer, before sharding."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    """Keys that a query sees, its own included; None on global layers."""
    rel_extent: int
    """Backward distances that carry a bias: 0 ... rel_extent - 1."""


@dataclasses.dataclass(frozen=True)
class InklingConfig:
    """Everything that the text model and its draft head read of config.json."""

    vocab_size: int
    unpadded_vocab_size: int
    hidden_size: int
    local: InklingAttentionShape
    full: InklingAttentionShape
    d_rel: int
    is_local: tuple[bool, ...]
    """For each layer."""
    is_dense: tuple[bool, ...]
    log_scaling_n_floor: int | None
    log_scaling_alpha: float
    conv_taps: int
    dense_intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    route_scale: float
    mup_multiplier: float
    """The final hidden state is divided by it before the head."""
    rms_norm_eps: float
    max_position_embeddings: int
    eos_token_id: int | None
    mtp_is_local: tuple[bool, ...]
    """For each depth of the draft head; empty where the checkpoint has none."""
    mtp_chain_norm: bool

    @property
    def num_layers(self) -> int:
        """Decoder layers of the backbone."""
        return len(self.is_local)

    def attention(self, is_local: bool) -> InklingAttentionShape:
        """The heads of a local or a global layer."""
        return self.local if is_local else self.full


def parse_inkling_config(hf_config: Mapping[str, Any]) -> InklingConfig:
    """Read either dialect, at the top level or under `text_config`.

    Raises `ConfigError` naming the key that is missing, of a wrong type, or set
    to something that no Inkling model has.
    """
    text = _Fields(_text_block(hf_config))
    original = "dense_intermediate_size" in text.values
    text.check_fixed()
    num_layers = text.integer("num_hidden_layers", limit=MAX_LAYERS)
    expert_key = "intermediate_size" if original else "moe_intermediate_size"
    dense_key = "dense_intermediate_size" if original else "intermediate_size"
    vocab_size = text.integer("vocab_size", default=201024)
    n_floor = text.values.get("log_scaling_n_floor")
    mtp_is_local, mtp_chain_norm = _mtp(hf_config, text)
    return InklingConfig(
        vocab_size=vocab_size,
        unpadded_vocab_size=text.integer("unpadded_vocab_size", default=vocab_size),
        hidden_size=text.integer("hidden_size"),
        local=_local_heads(text),
        full=_global_heads(text),
        d_rel=text.integer("d_rel", default=16),
        is_local=_local_layers(text, num_layers),
        is_dense=_dense_layers(text, num_layers),
        log_scaling_n_floor=None if n_floor is None else text.integer("log_scaling_n_floor"),
        log_scaling_alpha=text.number("log_scaling_alpha", default=0.1),
        conv_taps=text.integer("sconv_kernel_size", "conv_kernel_size", default=4),
        dense_intermediate_size=text.integer(dense_key),
        moe_intermediate_size=text.integer(expert_key, default=3072),
        num_experts=text.integer("n_routed_experts"),
        num_experts_per_tok=text.integer("num_experts_per_tok"),
        num_shared_experts=text.integer("n_shared_experts", least=0),
        route_scale=text.number("route_scale", default=8.0),
        mup_multiplier=text.number("logits_mup_width_multiplier", default=24.0),
        rms_norm_eps=text.number("rms_norm_eps", default=1e-6),
        max_position_embeddings=text.integer(
            "model_max_length", "max_position_embeddings", default=131072
        ),
        eos_token_id=hf_config.get("eos_token_id", text.values.get("eos_token_id")),
        mtp_is_local=mtp_is_local,
        mtp_chain_norm=mtp_chain_norm,
    )


def _text_block(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    block = hf_config.get("text_config") or hf_config
    if not isinstance(block, Mapping):
        raise _config_error(f"{FILE}'s text_config is {block!r}", "it must be an object")
    return block


def read_shape(hf_config: Mapping[str, Any]) -> ModelShape:
    """The normal form that checks, memory plans and the engine read (registry's shape reader)."""
    config = parse_inkling_config(hf_config)
    return ModelShape(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        intermediate_size=config.dense_intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        layers=tuple(
            layer_shape(config, local, is_moe=not dense)
            for local, dense in zip(config.is_local, config.is_dense, strict=True)
        ),
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.moe_intermediate_size,
        logits_vocab_size=config.unpadded_vocab_size,
        mtp_layers=tuple(layer_shape(config, local, is_moe=False) for local in config.mtp_is_local),
    )


def layer_shape(config: InklingConfig, is_local: bool, is_moe: bool) -> LayerShape:
    """One decoder layer, of the backbone or (dense) of the draft head."""
    heads = config.attention(is_local)
    return LayerShape(
        attention="sliding" if is_local else "full",
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        window=heads.window,
        rel_extent=heads.rel_extent,
        conv_taps=config.conv_taps,
        conv_width=2 * heads.num_kv_heads * heads.head_dim + 2 * config.hidden_size,
        is_moe=is_moe,
    )


def _global_heads(text: _Fields) -> InklingAttentionShape:
    num_heads = text.integer("num_attention_heads")
    return InklingAttentionShape(
        num_heads=num_heads,
        num_kv_heads=text.integer("num_key_value_heads"),
        head_dim=text.integer("head_dim", default=text.integer("hidden_size") // num_heads),
        window=None,
        rel_extent=text.integer("rel_extent", default=1024),
    )


def _local_heads(text: _Fields) -> InklingAttentionShape:
    full = _global_heads(text)
    window = text.integer("sliding_window_size", default=512)
    return InklingAttentionShape(
        num_heads=text.integer("swa_num_attention_heads", default=full.num_heads),
        num_kv_heads=text.integer("swa_num_key_value_heads", default=full.num_kv_heads),
        head_dim=text.integer("swa_head_dim", default=full.head_dim),
        window=window,
        rel_extent=window,
    )


def _local_layers(text: _Fields, num_layers: int) -> tuple[bool, ...]:
    """`layer_types` wins over `local_layer_ids`; neither: five local layers, then a global one."""
    kinds = text.kinds("layer_types", num_layers, {"hybrid_sliding": True, "hybrid": False})
    if kinds is not None:
        return kinds
    ids = text.values.get("local_layer_ids")
    if ids is None:
        return tuple((i + 1) % 6 != 0 for i in range(num_layers))
    local = set(text.integers("local_layer_ids"))
    return tuple(i in local for i in range(num_layers))


def _dense_layers(text: _Fields, num_layers: int) -> tuple[bool, ...]:
    kinds = text.kinds("mlp_layer_types", num_layers, {"dense": True, "sparse": False})
    if kinds is not None:
        return kinds
    first_sparse = text.integer("dense_mlp_idx", default=0, least=0)
    return tuple(i < first_sparse for i in range(num_layers))


def _mtp(hf_config: Mapping[str, Any], text: _Fields) -> tuple[tuple[bool, ...], bool]:
    """Depths of the draft head (local or not) and whether a norm follows each."""
    block = hf_config.get("mtp_config")
    if isinstance(block, Mapping):
        fields = _Fields(block)
        depths = fields.integer("num_nextn_predict_layers", default=0, least=0, limit=MAX_LAYERS)
        local_key = "local_layer_ids"
    else:
        fields = text
        depths = fields.integer("num_mtp_layers", default=0, least=0, limit=MAX_LAYERS)
        local_key = "mtp_local_layer_ids"
    local = set(fields.integers(local_key))
    chain = bool(fields.values.get("chain_hidden_post_norm", False))
    return tuple(depth in local for depth in range(depths)), chain


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Typed access to a block of config.json, with errors that name the key."""

    values: Mapping[str, Any]

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        for name in names:
            if self.values.get(name) is not None:
                return name, self.values[name]
        return names[0], None

    def integer(
        self, *names: str, default: int | None = None, least: int = 1, limit: int = 1 << 40
    ) -> int:
        name, value = self._find(names)
        if value is None:
            if default is None:
                raise _config_error(f"{FILE} has no {' or '.join(names)}", "Inkling needs it")
            return default
        if type(value) is not int or not least <= value <= limit:
            raise _config_error(
                f"{FILE} sets {name} to {value!r}",
                f"it must be a whole number from {least} to {limit}",
            )
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _config_error(f"{FILE} sets {name} to {value!r}", "it must be a number")
        return float(value)

    def integers(self, name: str) -> list[int]:
        value = self.values.get(name) or []
        if not isinstance(value, list) or any(type(v) is not int for v in value):
            raise _config_error(f"{FILE} sets {name} to {value!r}", "it must list layer numbers")
        return value

    def kinds(self, name: str, count: int, known: dict[str, bool]) -> tuple[bool, ...] | None:
        value = self.values.get(name)
        if value is None:
            return None
        allowed = " and ".join(known)
        if not isinstance(value, list) or any(v not in tuple(known) for v in value):
            raise _config_error(f"{FILE} sets {name} to {value!r}", f"Inkling knows {allowed}")
        if len(value) != count:
            raise _config_error(
                f"{FILE} lists {len(value)} {name}", f"num_hidden_layers is {count}"
            )
        return tuple(known[v] for v in value)

    def check_fixed(self) -> None:
        for name, wanted in _FIXED.items():
            if name in self.values and self.values[name] != wanted:
                raise _config_error(
                    f"{FILE} sets {name} to {self.values[name]!r}",
                    f"every released Inkling has {wanted!r}, and this engine computes only that",
                )


def _config_error(subject: str, why: str) -> ConfigError:
    return ConfigError(
        Diagnostic("config-value", subject, why=why, fix=f"check {FILE} against the model's page")
    )
