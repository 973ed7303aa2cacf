# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of the tensors that each architecture's checkpoint holds. Torch-free.

One table, three readers: preflight compares file headers with it, the loader checks that
everything came, and dummy weights are drawn from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]

INKLING = ("InklingForConditionalGeneration", "InklingForCausalLM", "InklingMTPModel")


def expected_tensors(
    hf_config: Mapping[str, Any],
    architecture: str,
    present: Collection[str] = (),
    with_draft_head: bool = False,
) -> Shapes:
    """Shape by name of every tensor that `architecture` needs with this config.json.

    `present` are the names in the file headers; they decide the spelling where a model is
    published in more than one.
    """
    if architecture in INKLING:
        from vllm.models.inkling import layout

        return layout.expected_tensors(hf_config, present, with_draft_head)
    hidden, vocab = hf_config["hidden_size"], hf_config["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(hf_config["num_hidden_layers"]):
        layer = _attention(hf_config, architecture)
        layer.update(_mlp(hf_config, architecture, index))
        layer["input_layernorm.weight"] = layer["post_attention_layernorm.weight"] = (hidden,)
        shapes.update({f"model.layers.{index}.{name}": s for name, s in layer.items()})
    shapes["model.norm.weight"] = (hidden,)
    if not hf_config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def optional_tensors(hf_config: Mapping[str, Any], architecture: str) -> tuple[str, ...]:
    """Names, prefixes or suffixes of tensors that may be present without being read."""
    if architecture in INKLING:
        from vllm.models.inkling import layout

        return layout.OPTIONAL
    tied = ("lm_head.weight",) if hf_config.get("tie_word_embeddings", False) else ()
    return (".rotary_emb.inv_freq", "rope_freqs.weight", *tied)


def head_dim_of(hf_config: Mapping[str, Any]) -> int:
    """Values a head has; config.json may leave it to the hidden size."""
    return hf_config.get("head_dim") or (
        hf_config["hidden_size"] // hf_config["num_attention_heads"]
    )


def num_kv_heads_of(hf_config: Mapping[str, Any]) -> int:
    """Key and value heads; as many as query heads where config.json is silent."""
    return hf_config.get("num_key_value_heads") or hf_config["num_attention_heads"]


def num_experts_of(hf_config: Mapping[str, Any]) -> int:
    """Experts a sparse layer has; transformers 5 writes every family's as `num_local_experts`."""
    return hf_config.get("num_experts") or hf_config.get("num_local_experts") or 0


def is_sparse_layer(hf_config: Mapping[str, Any], index: int) -> bool:
    """Whether Qwen3-MoE's layer `index` has experts."""
    step = hf_config.get("decoder_sparse_step") or 1
    only_dense = index in (hf_config.get("mlp_only_layers") or ())
    return not only_dense and num_experts_of(hf_config) > 0 and (index + 1) % step == 0


def _attention(hf_config: Mapping[str, Any], architecture: str) -> Shapes:
    hidden, head_dim = hf_config["hidden_size"], head_dim_of(hf_config)
    queries = hf_config["num_attention_heads"] * head_dim
    keys = num_kv_heads_of(hf_config) * head_dim
    shapes: Shapes = {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    optional_bias = architecture not in ("Qwen2ForCausalLM", "MixtralForCausalLM")
    bias = optional_bias and bool(hf_config.get("attention_bias", False))
    if bias or architecture == "Qwen2ForCausalLM":
        shapes["self_attn.q_proj.bias"] = (queries,)
        shapes["self_attn.k_proj.bias"] = shapes["self_attn.v_proj.bias"] = (keys,)
    if bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if architecture.startswith("Qwen3"):
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (head_dim,)
    return shapes


def _mlp(hf_config: Mapping[str, Any], architecture: str, index: int) -> Shapes:
    hidden = hf_config["hidden_size"]
    if architecture == "MixtralForCausalLM":
        inner, experts = hf_config["intermediate_size"], num_experts_of(hf_config)
        return _experts("block_sparse_moe", ("w1", "w3", "w2"), experts, hidden, inner)
    names = ("gate_proj", "up_proj", "down_proj")
    if architecture == "Qwen3MoeForCausalLM" and is_sparse_layer(hf_config, index):
        inner, experts = hf_config["moe_intermediate_size"], num_experts_of(hf_config)
        return _experts("mlp", names, experts, hidden, inner)
    shapes = _gated("mlp", names, hidden, hf_config["intermediate_size"])
    if hf_config.get("mlp_bias", False) and not architecture.startswith("Qwen"):
        for name, shape in list(shapes.items()):
            shapes[name.removesuffix("weight") + "bias"] = shape[:1]
    return shapes


def _gated(prefix: str, names: tuple[str, str, str], hidden: int, inner: int) -> Shapes:
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}


def _experts(
    block: str, names: tuple[str, str, str], num_experts: int, hidden: int, inner: int
) -> Shapes:
    shapes: Shapes = {f"{block}.gate.weight": (num_experts, hidden)}
    for expert in range(num_experts):
        shapes.update(_gated(f"{block}.experts.{expert}", names, hidden, inner))
    return shapes


_GGUF_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_GGUF_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_DENSE_PARTS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_PARTS = ("w1", "w3", "w2")


def gguf_names(name: str, architecture: str, hf_config: Mapping[str, Any]) -> list[str]:
    """A GGUF tensor's Hugging Face names: one, or one an expert; none if nobody reads it."""
    if name in _GGUF_TOP_NAMES:
        return [_GGUF_TOP_NAMES[name]]
    if not name.startswith("blk.") or name.count(".") < 2:
        return []
    _, index, leaf = name.split(".", 2)
    module, _, kind = leaf.rpartition(".")
    prefix = f"model.layers.{index}."
    if module in _GGUF_MODULES:
        return [f"{prefix}{_GGUF_MODULES[module]}.{kind}"]
    mixtral = architecture == "MixtralForCausalLM"
    block = "block_sparse_moe" if mixtral else "mlp"
    if module == "ffn_gate_inp":
        return [f"{prefix}{block}.gate.{kind}"]
    parts = dict(zip(_GGUF_EXPERTS, _MIXTRAL_PARTS if mixtral else _DENSE_PARTS, strict=True))
    if module not in parts:
        return []
    experts = range(num_experts_of(hf_config))
    return [f"{prefix}{block}.experts.{e}.{parts[module]}.{kind}" for e in experts]
