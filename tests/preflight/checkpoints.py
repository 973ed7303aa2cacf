# SPDX-License-Identifier: Apache-2.0
"""Safetensors files written by hand, so that headers can be wrong in any way."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from vllm.models.layouts import expected_tensors
from vllm.preflight.safetensors_header import DTYPE_BITS

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}


def header_of(tensors: dict[str, tuple[str, list[int]]]) -> tuple[bytes, int]:
    """A header for tensors given as name -> (dtype, shape), and the data's size in bytes."""
    entries, position = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
        entries[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text, position


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> Path:
    """A whole file; its data is a hole, so that even huge ones take no disk."""
    header, size = header_of(tensors)
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    return path


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    """model.safetensors.index.json."""
    content = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


class Model:
    """A checkpoint directory of the right files, to be spoilt."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.path = path
        self.config = {**LLAMA, **config}
        self.tensors = {
            name: ("BF16", list(shape))
            for name, shape in expected_tensors(self.config, "LlamaForCausalLM").items()
        }
        self.write()

    def write(self) -> None:
        (self.path / "config.json").write_text(json.dumps(self.config))
        write_safetensors(self.path / "model.safetensors", self.tensors)
        vocab = {f"t{i}": i for i in range(512)}
        tokenizer = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": []}
        (self.path / "tokenizer.json").write_text(json.dumps(tokenizer))
        (self.path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')

    def set(self, **config: Any) -> None:
        """Change config.json alone; the weights stay as they are."""
        self.config.update(config)
        kept = {k: v for k, v in self.config.items() if v is not ...}
        (self.path / "config.json").write_text(json.dumps(kept))


def gguf_file(path: Path, **changes: Any) -> Path:
    """A whole small GGUF file; `changes`: pre, model, tokens, drop (a tensor), shape, template."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"context_length": 128, "embedding_length": 32, "feed_forward_length": 64}
    for key, value in {**sizes, "block_count": 1, "head_count": 4, "head_count_kv": 2}.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    writer.add_tokenizer_pre(changes.get("pre", "default"))
    writer.add_token_list([f"t{i}" for i in range(changes.get("tokens", 16))])
    if changes.get("template", True):
        writer.add_chat_template("{{ messages }}")
    layer = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32),
             "attn_norm": (32,), "ffn_norm": (32,), "ffn_gate": (64, 32), "ffn_up": (64, 32),
             "ffn_down": (32, 64)}  # fmt: skip
    shapes = {f"blk.0.{n}.weight": s for n, s in layer.items()}
    shapes |= {"token_embd.weight": (16, 32), "output_norm.weight": (32,)}
    shapes |= changes.get("shape", {})
    for name, shape in shapes.items():
        if name != changes.get("drop"):
            writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
