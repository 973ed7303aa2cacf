# SPDX-License-Identifier: Apache-2.0
"""GGUF's header without numpy: metadata as config.json would say it, and the tensors' shapes.

Layout (little endian): magic "GGUF", version, tensor count, key count; keys with typed
values; tensor names with dimensions (fastest first), type and offset; then aligned data.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
from typing import Any

from vllm.errors import ConfigError, Diagnostic
from vllm.models.registry import GGUF_ARCHITECTURES

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_ITEMS = 1 << 26

# ggml type number -> (name, values a block, bytes a block)
GGML_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 30: ("BF16", 1, 2),
}  # fmt: skip


class _Reader:
    """A cursor over the mapped file that never reads past its end."""

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self.data, self.position, self.path = data, 4, path

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        if self.position + size > len(self.data):
            raise _broken(self.path, f"it ends inside its header, at byte {len(self.data):,}")
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += size
        return value

    def count(self) -> int:
        number = self.scalar("Q")
        if number > min(_MAX_ITEMS, len(self.data)):
            raise _broken(self.path, f"a count of {number:,} at byte {self.position - 8:,}")
        return number

    def string(self) -> str:
        length = self.count()
        end = self.position + length
        if end > len(self.data):
            raise _broken(self.path, f"it ends inside its header, at byte {len(self.data):,}")
        text = self.data[self.position : end].decode("utf-8", "replace")
        self.position = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, length = self.scalar("I"), self.count()
            if item == _ARRAY:
                raise _broken(self.path, "an array of arrays")
            return Array(self._skip(item, length), length)
        if kind not in _SCALARS:
            raise _broken(self.path, f"a value of unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def _skip(self, item: int, length: int) -> int:
        """Pass over an array: vocabularies are long and nobody here reads them."""
        if item == _STRING:
            self.position = self._skip_strings(length)
        elif item in _SCALARS:
            self.position += struct.calcsize("<" + _SCALARS[item]) * length
        else:
            raise _broken(self.path, f"an array of unknown type {item}")
        return item

    def _skip_strings(self, number: int) -> int:
        """Where the strings end; a vocabulary has hundreds of thousands."""
        data, size, position = self.data, len(self.data), self.position
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(number):
            if position + 8 > size:
                raise _broken(self.path, f"it ends inside its header, at byte {size:,}")
            position += 8 + length_at(data, position)[0]
        return position


class Array:
    """An array that was passed over: its type and length."""

    def __init__(self, item: int, length: int) -> None:
        self.item, self.length = item, length


class GgufHeader:
    """What a GGUF file says before its data."""

    def __init__(
        self,
        metadata: dict[str, Any],
        tensors: dict[str, tuple[str, tuple[int, ...]]],
        offsets: dict[str, int],
    ):
        self.metadata = metadata
        self.tensors = tensors
        """Name to (type, shape as torch would have it)."""
        self.offsets = offsets
        """Name to the byte of the file where the tensor's data begins."""

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of this architecture, such as "block_count"."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_gguf_header(path: str) -> GgufHeader:
    """Read `path`'s header. Raises `ConfigError` saying what is wrong with the file.

    Several readers ask within one start, so the last answer is kept while the file is the same.
    """
    try:
        stat = os.stat(path)
    except OSError as error:
        raise _broken(path, error.strerror or str(error)) from None
    return _read(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@functools.lru_cache(maxsize=1)
def _read(path: str, identity: tuple[int, ...]) -> GgufHeader:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            magic = file.read(4)
            if magic != b"GGUF":
                what = (
                    "is empty" if size == 0 else "is a Git LFS pointer" if magic == b"vers" else ""
                )
                raise _broken(path, what or f"it starts with {magic!r}, not with GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Reader(data, path), size)
    except OSError as error:
        raise _broken(path, error.strerror or str(error)) from None


def _parse(reader: _Reader, size: int) -> GgufHeader:
    version = reader.scalar("I")
    if version not in (2, 3):
        raise _broken(reader.path, f"version {version}; 2 and 3 are known")
    num_tensors, num_keys = reader.count(), reader.count()
    metadata = {}
    for _ in range(num_keys):
        key = reader.string()
        metadata[key] = reader.value(reader.scalar("I"))
    tensors, offsets, end = {}, {}, 0
    for _ in range(num_tensors):
        name = reader.string()
        num_dims = reader.scalar("I")
        if num_dims > 4:
            raise _broken(reader.path, f"tensor {name!r} has {num_dims} dimensions")
        shape = tuple(reversed([reader.scalar("Q") for _ in range(num_dims)]))
        kind, offset = reader.scalar("I"), reader.scalar("Q")
        if kind not in GGML_TYPES:
            raise _unknown_type(reader.path, name, kind)
        type_name, values, num_bytes = GGML_TYPES[kind]
        count = 1
        for dim in shape:
            count *= dim
        tensors[name], offsets[name] = (type_name, shape), offset
        end = max(end, offset + count // values * num_bytes)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise _broken(reader.path, f"an alignment of {alignment!r}")
    start = -(-reader.position // alignment) * alignment
    if start + end > size:
        raise ConfigError(
            Diagnostic(
                "weights-truncated",
                f"{os.path.basename(reader.path)} is {start + end - size:,} bytes short",
                why=f"its header names data up to byte {start + end:,}, the file ends at {size:,}",
                fix="download the file again",
            )
        )
    return GgufHeader(metadata, tensors, {n: start + offset for n, offset in offsets.items()})


def _broken(path: str, why: str) -> ConfigError:
    return ConfigError(
        Diagnostic(
            "gguf-broken",
            f"{os.path.basename(path)} is no usable GGUF file",
            why=why,
            where=path,
            fix="download the file again",
        )
    )


def _unknown_type(path: str, name: str, kind: int) -> ConfigError:
    return ConfigError(
        Diagnostic(
            "gguf-type",
            f"tensor {name!r} is stored in a format that this engine cannot read",
            why=f"ggml type {kind}; known: {', '.join(t[0] for t in GGML_TYPES.values())}",
            where=path,
            fix="use a file quantised to one of these",
        )
    )


def gguf_to_hf_config(header: GgufHeader, path: str) -> dict[str, Any]:
    """The metadata under config.json's names. Raises `ConfigError` for what is not served."""
    architecture = GGUF_ARCHITECTURES.get(header.architecture)
    if architecture is None:
        raise ConfigError(
            Diagnostic(
                "architecture-unknown",
                f"the GGUF architecture {header.architecture!r} is not known",
                why=f"known: {', '.join(GGUF_ARCHITECTURES)}",
                where=path,
                see="docs/models/supported_models.md",
            )
        )
    heads, embedding = header.get("attention.head_count"), header.tensors.get("token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": {"qwen3moe": "qwen3_moe"}.get(header.architecture, header.architecture),
        "hidden_size": header.get("embedding_length"),
        "num_hidden_layers": header.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.get("attention.head_count_kv", heads),
        "head_dim": header.get("attention.key_length"),
        "intermediate_size": header.get("feed_forward_length"),
        "max_position_embeddings": header.get("context_length"),
        "rms_norm_eps": header.get("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": header.get("rope.freq_base", 10000.0),
        "vocab_size": embedding[1][0] if embedding and embedding[1] else None,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "hidden_act": "silu",
    }
    config.update(_rope_scaling(header))
    if header.get("expert_count"):
        config["num_experts"] = config["num_local_experts"] = header.get("expert_count")
        config["num_experts_per_tok"] = header.get("expert_used_count")
        config["moe_intermediate_size"] = header.get("expert_feed_forward_length")
        config["norm_topk_prob"] = True
        if architecture == "LlamaForCausalLM":
            config["architectures"] = ["MixtralForCausalLM"]
    return {k: v for k, v in config.items() if v is not None}


def _rope_scaling(header: GgufHeader) -> dict[str, Any]:
    kind = header.get("rope.scaling.type")
    if kind in (None, "none"):
        return {}
    scaling = {
        "rope_type": kind,
        "factor": header.get("rope.scaling.factor", 1.0),
        "original_max_position_embeddings": header.get("rope.scaling.original_context_length"),
    }
    return {"rope_scaling": {k: v for k, v in scaling.items() if v is not None}}
