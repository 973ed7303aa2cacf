# SPDX-License-Identifier: Apache-2.0
"""Tiny Inkling checkpoints in the public spelling: original names, a draft head, NVFP4 experts.

The tensors are those of transformers' tiny model, renamed by the table of names below, so that
transformers stays the oracle; the draft head's are random.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.fixtures.tiny_models import tiny_checkpoint, tiny_reference

MTP_LOCAL = (0, 2)
MTP_DEPTHS = 3
_SAME = {
    "self_attn.q_proj.weight": "attn.wq_du.weight",
    "self_attn.k_proj.weight": "attn.wk_dv.weight",
    "self_attn.v_proj.weight": "attn.wv_dv.weight",
    "self_attn.r_proj.weight": "attn.wr_du.weight",
    "self_attn.o_proj.weight": "attn.wo_ud.weight",
    "self_attn.q_norm.weight": "attn.q_norm.weight",
    "self_attn.k_norm.weight": "attn.k_norm.weight",
    "self_attn.rel_logits_proj.proj": "attn.rel_logits_proj.proj",
    "self_attn.k_sconv.conv1d.weight": "attn.k_sconv.weight",
    "self_attn.v_sconv.conv1d.weight": "attn.v_sconv.weight",
    "attn_sconv.conv1d.weight": "attn_sconv.weight",
    "mlp_sconv.conv1d.weight": "mlp_sconv.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
    "mlp.gate.weight": "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias": "mlp.gate.bias",
    "mlp.gate.global_scale": "mlp.gate.global_scale",
    "mlp.global_scale": "mlp.global_scale",
    "mlp.down_proj.weight": "mlp.w2_md.weight",
    "mlp.experts.down_proj": "mlp.experts.w2_weight",
    "mlp.shared_experts.down_proj": "mlp.shared_experts.shared_w2_weight",
}


_KEPT = (
    *("vocab_size", "unpadded_vocab_size", "hidden_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim"),
    *("sliding_window_size", "rel_extent", "d_rel", "log_scaling_n_floor", "log_scaling_alpha"),
    *("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "route_scale"),
    "logits_mup_width_multiplier",
)
"""Keys that both dialects spell alike."""


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows gate 0, up 0, gate 1, up 1, ... of matrices or of stacks of them."""
    return torch.stack((gate, up), -2).flatten(-3, -2)


def original_layer(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """One layer of transformers' state under its original names."""
    found = {new: state[prefix + old] for old, new in _SAME.items() if prefix + old in state}
    if prefix + "mlp.gate.weight" in state:
        found["mlp.experts.w13_weight"] = interleaved(
            *state[prefix + "mlp.experts.gate_up_proj"].chunk(2, 1)
        )
        shared = prefix + "mlp.shared_experts."
        found["mlp.shared_experts.shared_w13_weight"] = interleaved(
            state[shared + "gate_proj"], state[shared + "up_proj"]
        )
    else:
        found["mlp.w13_dn.weight"] = interleaved(
            state[prefix + "mlp.gate_proj.weight"], state[prefix + "mlp.up_proj.weight"]
        )
    return found


def original_tensors() -> dict[str, torch.Tensor]:
    """transformers' tiny text model in the public spelling."""
    state = tiny_reference("inkling-text").state_dict()
    tensors = {
        "model.llm.embed.weight": state["model.embed_tokens.weight"],
        "model.llm.norm.weight": state["model.norm.weight"],
        "model.llm.unembed.weight": state["lm_head.weight"],
    }
    norms = [n for n in state if n.endswith("embed_norm.weight")]
    tensors["model.llm.embed_norm.weight"] = state[norms[0]]
    for index in range(7):
        for name, tensor in original_layer(state, f"model.layers.{index}.").items():
            tensors[f"model.llm.layers.{index}.{name}"] = tensor
    return tensors


def draft_head(tensors: dict[str, torch.Tensor], seed: int = 3) -> dict[str, torch.Tensor]:
    """Three random depths, shaped like the dense layers that they are."""
    generator = torch.Generator().manual_seed(seed)

    def random(like: torch.Tensor, name: str) -> torch.Tensor:
        noise = torch.randn(like.shape, generator=generator)
        if name.endswith("norm.weight"):
            return 1 + 0.3 * noise
        if "scale" in name:
            return 1.3 + 0.1 * noise
        return noise * 1.5 / math.sqrt(like.shape[-1])

    dense = {n.split(".", 4)[4]: t for n, t in tensors.items() if ".layers.0." in n}
    full = {n.split(".", 4)[4]: t for n, t in tensors.items() if ".layers.5." in n}
    found: dict[str, torch.Tensor] = {}
    for depth in range(MTP_DEPTHS):
        prefix = f"model.mtp.layers.{depth}."
        for name, like in dense.items():
            like = like if depth in MTP_LOCAL else full.get(name, like)
            found[f"{prefix}transformer_block.{name}"] = random(like, name)
        norm = tensors["model.llm.norm.weight"]
        found[prefix + "hidden_norm.weight"] = random(norm, "norm.weight")
        found[prefix + "embed_norm.weight"] = random(norm, "norm.weight")
        found[prefix + "input_proj.weight"] = random(torch.empty(64, 128), "proj")
    found["model.mtp.chain_norm.weight"] = random(norm, "norm.weight")
    return found


def original_config() -> dict[str, Any]:
    """config.json in the original dialect."""
    old = json.loads((tiny_checkpoint("inkling-text") / "config.json").read_text())
    return {
        **{key: old[key] for key in _KEPT},
        "architectures": ["InklingForCausalLM"],
        "model_type": "inkling_model",
        "local_layer_ids": [0, 1, 2, 3, 4, 6],
        "model_max_length": old["max_position_embeddings"],
        "sconv_kernel_size": old["conv_kernel_size"],
        "dense_mlp_idx": 2,
        "dense_intermediate_size": old["intermediate_size"],
        "intermediate_size": old["moe_intermediate_size"],
        "torch_dtype": "float32",
        "rms_norm_eps": 1e-6,
        "use_sconv": True,
        "use_embed_norm": True,
        "shared_expert_sink": True,
        "eos_token_id": 2,
        "mtp_config": {
            "num_nextn_predict_layers": MTP_DEPTHS,
            "local_layer_ids": list(MTP_LOCAL),
            "chain_hidden_post_norm": True,
        },
    }


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def packed_nvfp4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A stack of experts as the public files store it, by suffix, and the values it stands for."""
    scale2 = weight.abs().amax((1, 2)) / (6 * 448)
    blocks = weight.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1) / 6 / scale2[:, None, None]).clamp(2**-9, 448)
    scale = scale.to(torch.float8_e4m3fn)
    factor = (scale.float() * scale2[:, None, None])[..., None]
    index = ((blocks / factor).abs()[..., None] - _E2M1).abs().argmin(-1)
    nibbles = (index + 8 * (blocks < 0)).flatten(-2).to(torch.uint8)
    value = _E2M1[index] * torch.where(blocks < 0, -1.0, 1.0) * factor
    packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    parts = {
        "": packed,
        ".scale": scale,
        ".scale2": scale2,
        ".input_amax": torch.ones(1, dtype=torch.bfloat16),
        ".original_shape": torch.tensor(weight.shape),
    }
    return parts, value.flatten(-2)


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="inkling-")


def _write(name: str, tensors: dict[str, torch.Tensor]) -> Path:
    path = Path(_directory().name) / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(original_config()))
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        source = tiny_checkpoint("inkling-text") / file
        (path / file).write_bytes(source.read_bytes())
    return path


@functools.cache
def original_checkpoint() -> Path:
    """Original names, original dialect, three depths of a draft head."""
    tensors = original_tensors()
    return _write("original", tensors | draft_head(tensors))


@functools.cache
def nvfp4_checkpoints() -> tuple[Path, Path]:
    """Experts from layer 3 on as NVFP4, and the same values unpacked in float32."""
    stored, values = original_tensors(), original_tensors()
    for name in list(stored):
        if ".experts.w" in name and int(name.split(".")[3]) >= 3:
            parts, values[name] = packed_nvfp4(stored.pop(name))
            stored |= {name + suffix: tensor for suffix, tensor in parts.items()}
    packed = _write("nvfp4", stored)
    quantization = {"quant_algo": "NVFP4", "group_size": 16}
    (packed / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    return packed, _write("unpacked", values)
