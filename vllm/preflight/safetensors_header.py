# SPDX-License-Identifier: Apache-2.0
"""Read and check a safetensors file's header without touching a byte of its data.

Layout: 8 bytes little-endian header length N, N bytes of JSON mapping a tensor's
name to {dtype, shape, data_offsets}, then the data; offsets count from there.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import msgspec

from vllm.errors import Diagnostic

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor as a header describes it."""

    name: str
    dtype: str
    """safetensors' name (BF16, F8_E4M3, ...) or GGUF's (Q4_K, ...)."""
    shape: tuple[int, ...]
    num_bytes: int
    file: str

    @property
    def num_elements(self) -> int:
        """Number of stored values (packed formats count their containers)."""
        return math.prod(self.shape)


class HeaderError(Exception):
    """A file that cannot be used; carries the finding."""

    def __init__(self, finding: Diagnostic) -> None:
        super().__init__(finding.subject)
        self.finding = finding


def _fail(code: str, subject: str, why: str, fix: str) -> HeaderError:
    return HeaderError(Diagnostic(code, subject, why=why, fix=fix))


def read_header(path: str) -> list[TensorInfo]:
    """The tensors of `path`. Raises `HeaderError` naming what is wrong with the file."""
    name = os.path.basename(path)
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            entries, data_start = _read_json(file, name, size)
    except OSError as error:
        raise _fail(
            "weights-unreadable",
            f"{name} cannot be read",
            error.strerror or str(error),
            f"check the permissions of {path}",
        ) from None
    tensors = [_parse_entry(key, entry, name) for key, entry in entries.items()]
    _check_extent(tensors, name, data_start, size)
    return [info for info, _ in tensors]


def _read_json(file: Any, name: str, size: int) -> tuple[dict[str, Any], int]:
    """The header's entries and the offset at which the data starts."""
    again = "download the file again"
    if size == 0:
        raise _fail("weights-empty", f"{name} is empty", "its size is 0 bytes", again)
    head = file.read(8)
    if head.startswith(b"version "):
        raise _fail(
            "weights-lfs-pointer",
            f"{name} is a Git LFS pointer, not weights",
            f"the file holds {size} bytes of text that name the real one",
            "run git lfs pull in the model directory",
        )
    if len(head) < 8:
        raise _fail("weights-corrupt", f"{name} is no safetensors file",
                    f"it holds {size} bytes, a header length takes 8", again)  # fmt: skip
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER_BYTES:
        raise _fail(
            "weights-corrupt",
            f"{name} is no safetensors file",
            f"its first 8 bytes name a header of {length:,} bytes, the format allows "
            f"{MAX_HEADER_BYTES:,}",
            again,
        )
    if 8 + length > size:
        raise _fail(
            "weights-truncated",
            f"{name} ends inside its header",
            f"the header runs to byte {8 + length:,}, the file ends at {size:,}",
            again,
        )
    try:
        entries = msgspec.json.decode(file.read(length), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _fail("weights-corrupt", f"{name} has a broken header", str(error), again) from None
    entries.pop("__metadata__", None)
    return entries, 8 + length


def _parse_entry(key: str, entry: Any, name: str) -> tuple[TensorInfo, tuple[int, int]]:
    def broken(why: str) -> HeaderError:
        return _fail("weights-corrupt", f"{name} describes tensor {key!r} wrongly", why,
                     "download the file again")  # fmt: skip

    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise broken("dtype, shape and data_offsets are needed") from None
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if not all(type(n) is int and n >= 0 for n in numbers) or not isinstance(dtype, str):
        raise broken(f"shape {shape!r}, data_offsets [{begin!r}, {end!r}]")
    if dtype not in DTYPE_BITS:
        raise broken(f"unknown dtype {dtype}")
    needed = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if end - begin != needed:
        raise broken(
            f"{dtype} {list(shape)} takes {needed:,} bytes, its offsets span {end - begin:,}"
        )
    return TensorInfo(key, dtype, tuple(shape), needed, name), (begin, end)


def _check_extent(
    tensors: list[tuple[TensorInfo, tuple[int, int]]], name: str, data_start: int, size: int
) -> None:
    """The data must fill the file exactly, without gaps or overlaps."""
    position = 0
    for info, (begin, end) in sorted(tensors, key=lambda item: item[1]):
        if begin != position:
            raise _fail("weights-corrupt", f"{name} describes tensor {info.name!r} wrongly",
                        f"its data starts at {begin:,}, the tensor before ends at {position:,}",
                        "download the file again")  # fmt: skip
        position = end
    end_of_data = data_start + position
    if size < end_of_data:
        missing = end_of_data - size
        raise _fail(
            "weights-truncated",
            f"{name} is {missing:,} byte{'s' if missing != 1 else ''} short",
            f"its header names data up to byte {end_of_data:,}, the file ends at {size:,}",
            "download the file again",
        )
    if size > end_of_data:
        raise _fail(
            "weights-corrupt",
            f"{name} is longer than its header says",
            f"the data ends at byte {end_of_data:,}, the file at {size:,}",
            "download the file again",
        )
