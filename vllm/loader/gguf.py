# SPDX-License-Identifier: Apache-2.0
"""GGUF: llama.cpp's single file, dequantised to the model's dtype while it is read.

Names are brought to the spelling of Hugging Face checkpoints, so that models know only one,
and the rows of Llama's query and key matrices back into their order: llama.cpp rotates
neighbouring values of a head where everybody else rotates halves.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from vllm.config.gguf_header import read_gguf_header
from vllm.loader.source import NamedTensors, WeightSource
from vllm.models.layouts import gguf_names, num_kv_heads_of

if TYPE_CHECKING:
    import numpy as np

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PERMUTED = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")


def gguf_source(
    path: str, hf_config: Mapping[str, Any], architecture: str, dtype: torch.dtype
) -> WeightSource:
    """The weights in file `path` under Hugging Face names, in `dtype`."""
    header = read_gguf_header(path)
    names = [name for n in header.tensors for name in gguf_names(n, architecture, hf_config)]

    def tensors() -> NamedTensors:
        import numpy as np

        data = np.memmap(path, dtype=np.uint8, mode="r")
        for name, (kind, shape) in header.tensors.items():
            targets = gguf_names(name, architecture, hf_config)
            if targets:
                values = dequantize(data[header.offsets[name] :], kind, shape, dtype)
                yield from _in_order(name, values, targets, hf_config, architecture)

    return WeightSource(tuple(names), tensors)


def _in_order(
    name: str,
    values: torch.Tensor,
    targets: list[str],
    hf_config: Mapping[str, Any],
    architecture: str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor under its Hugging Face names: rows put back, experts taken apart."""
    if architecture in _PERMUTED and ".attn_q." in name:
        values = _halves_together(values, hf_config["num_attention_heads"])
    elif architecture in _PERMUTED and ".attn_k." in name:
        values = _halves_together(values, num_kv_heads_of(hf_config))
    if "_exps." in name:
        yield from zip(targets, values, strict=True)
    else:
        yield targets[0], values


def dequantize(
    data: np.ndarray, kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Values of a tensor whose bytes `data` begins with, stored as ggml type `kind`."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize as decode

    quantization = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    row_bytes = shape[-1] // block * block_bytes
    rows = data[: math.prod(shape[:-1]) * row_bytes].reshape(-1, row_bytes)
    plain = _PLAIN.get(kind)
    if plain is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(rows).view(plain).view(shape).to(dtype)
    return torch.from_numpy(decode(rows, quantization)).view(shape).to(dtype)


def _halves_together(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of a head's rows: 0, d/2, 1, d/2 + 1, ... back to 0, 1, 2, ..."""
    pairs = values.unflatten(0, (num_heads, -1, 2))  # (heads, head_dim / 2, 2, ...)
    return pairs.transpose(1, 2).reshape(values.shape)
