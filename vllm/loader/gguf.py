# SPDX-License-Identifier: Apache-2.0
"""GGUF: llama.cpp's single file, dequantised to the model's dtype while it is read.

Names are brought to the spelling of Hugging Face checkpoints, so that models know only one,
and the rows of Llama's query and key matrices back into their order: llama.cpp rotates
neighbouring values of a head where everybody else rotates halves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from vllm.errors import ConfigError, Diagnostic
from vllm.loader.source import NamedTensors, WeightSource
from vllm.models.layouts import num_experts_of, num_kv_heads_of

if TYPE_CHECKING:
    from gguf import ReaderTensor

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_LAYER_MODULES = {
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
_PERMUTED = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")


def gguf_source(
    path: str, hf_config: Mapping[str, Any], architecture: str, dtype: torch.dtype
) -> WeightSource:
    """The weights in file `path` under Hugging Face names, in `dtype`."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (ValueError, OSError) as error:
        raise ConfigError(
            Diagnostic("gguf-broken", f"{path} cannot be read", why=str(error))
        ) from error
    names = [name for t in reader.tensors for name in _names(t.name, architecture, hf_config)]

    def tensors() -> NamedTensors:
        for tensor in reader.tensors:
            yield from _convert(tensor, hf_config, architecture, dtype)

    return WeightSource(tuple(names), tensors)


def _names(name: str, architecture: str, hf_config: Mapping[str, Any]) -> list[str]:
    """A GGUF tensor's Hugging Face names: one, or one an expert; none if nobody reads it."""
    if name in _TOP_NAMES:
        return [_TOP_NAMES[name]]
    if not name.startswith("blk."):
        return []
    _, index, leaf = name.split(".", 2)
    module, _, kind = leaf.rpartition(".")
    prefix = f"model.layers.{index}."
    if module in _LAYER_MODULES:
        return [f"{prefix}{_LAYER_MODULES[module]}.{kind}"]
    mixtral = architecture == "MixtralForCausalLM"
    block = "block_sparse_moe" if mixtral else "mlp"
    if module == "ffn_gate_inp":
        return [f"{prefix}{block}.gate.{kind}"]
    parts = dict(zip(_EXPERT_MODULES, _MIXTRAL_PARTS if mixtral else _DENSE_PARTS, strict=True))
    if module not in parts:
        return []
    experts = range(num_experts_of(hf_config))
    return [f"{prefix}{block}.experts.{e}.{parts[module]}.{kind}" for e in experts]


_EXPERT_MODULES = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_DENSE_PARTS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_PARTS = ("w1", "w3", "w2")


def _convert(
    tensor: ReaderTensor, hf_config: Mapping[str, Any], architecture: str, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    names = _names(tensor.name, architecture, hf_config)
    if not names:
        return
    values = dequantize(tensor, dtype)
    if architecture in _PERMUTED and ".attn_q." in tensor.name:
        values = _halves_together(values, hf_config["num_attention_heads"])
    elif architecture in _PERMUTED and ".attn_k." in tensor.name:
        values = _halves_together(values, num_kv_heads_of(hf_config))
    if "_exps." in tensor.name:
        yield from zip(names, values, strict=True)
    else:
        yield names[0], values


def dequantize(tensor: ReaderTensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of a GGUF tensor; ConfigError for a format that the gguf package cannot decode."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as decode

    kind = tensor.tensor_type
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return _from_numpy(tensor.data).to(dtype)
    shape = tuple(int(n) for n in reversed(tensor.shape))
    if kind == GGMLQuantizationType.BF16:
        return _from_numpy(tensor.data.view(np.int16)).view(torch.bfloat16).view(shape).to(dtype)
    try:
        values = decode(tensor.data, kind)
    except NotImplementedError as error:
        raise ConfigError(
            Diagnostic(
                "gguf-format",
                f"{tensor.name} is stored as {kind.name}, which cannot be decoded",
                fix="use a file in Q4_0, Q4_1, Q5_K, Q6_K, Q8_0 or 16 bits",
            )
        ) from error
    return torch.from_numpy(values).view(shape).to(dtype)


def _from_numpy(array: Any) -> torch.Tensor:
    """A tensor over a read-only mapping; nobody writes through it."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _halves_together(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of a head's rows: 0, d/2, 1, d/2 + 1, ... back to 0, 1, 2, ..."""
    pairs = values.unflatten(0, (num_heads, -1, 2))  # (heads, head_dim / 2, 2, ...)
    return pairs.transpose(1, 2).reshape(values.shape)
