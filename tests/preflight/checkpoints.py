# SPDX-License-Identifier: Apache-2.0
"""Safetensors files written by hand, so that headers can be wrong in any way."""

from __future__ import annotations

import json
import math
from pathlib import Path

from vllm.preflight.safetensors_header import DTYPE_BITS


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
