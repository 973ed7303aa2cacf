# SPDX-License-Identifier: Apache-2.0
"""Launch configurations of the attention kernels.

A configuration is a pure function of the chip's name and the problem's shape, so that
the launcher and the ahead-of-time compilation test take the same one.
"""

from __future__ import annotations

import dataclasses

from vllm.layers.ops.chips import INTERPRETER, SHARED_MEMORY_BYTES


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Block sizes and launch options of one kernel."""

    block_m: int
    """Query rows a program holds; a row is one token of one query head."""
    block_n: int
    """Keys a step of the inner loop."""
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    """Programs that fit one multiprocessor; sizes the grid of the decode kernel."""


def bias_tiles_ahead(arch: str) -> int:
    """Tiles of a relative bias that the query-tile kernel asks for in advance, in PTX; 0: none.

    Each element is read once, so every tile comes from memory. H200, 1 x 4,096 tokens: 268
    TFLOP/s without, 288 with 2 ahead, 286 with 4, 280 with 8.
    """
    return 2 if arch.startswith("sm_") else 0


def next_power_of_2(value: int) -> int:
    """Smallest power of two that is at least `value` (1 for 0)."""
    return 1 << max(0, value - 1).bit_length()


def _shared_memory(arch: str) -> int:
    """Limit of `arch`; the smallest known one for chips that the table does not name."""
    return SHARED_MEMORY_BYTES.get(arch, min(SHARED_MEMORY_BYTES.values()))


def _fit(arch: str, candidates: list[tuple[int, int]], fixed: int, row_bytes: int) -> int:
    """Index of the first (block_n, num_stages) whose buffers fit; the last one if none does."""
    limit = _shared_memory(arch)
    for index, (block_n, num_stages) in enumerate(candidates):
        # K and V tiles of every stage, beside what the kernel keeps for its queries.
        if fixed + 2 * num_stages * block_n * row_bytes <= limit:
            return index
    return len(candidates) - 1


def decode_config(
    arch: str, rows: int, head_dim: int, itemsize: int, page: int = 16
) -> KernelConfig:
    """Configuration of the split-KV kernel.

    On Hopper one program with deep buffers a multiprocessor is the fastest where a tile lies in
    one page: 1 x 65,536 keys, page 128, 90 % of the copy rate, two shallow ones 85 %; with
    pages of 16 keys the two are.

    Args:
        arch: Chip name as `device_arch` gives it.
        rows: Query tokens a request times query heads a KV head, at most 128.
        head_dim: Width of a head.
        itemsize: Bytes an element of the cache.
        page: Keys a block of the cache.
    """
    block_m = max(16, next_power_of_2(rows))
    if arch == INTERPRETER:
        return KernelConfig(block_m, 32, 4, 1, programs_per_sm=3)
    block_d = max(16, next_power_of_2(head_dim))
    row_bytes = block_d * itemsize
    if arch == "sm_90" and page % 128 == 0 and row_bytes <= 256 and block_m <= 32:
        return KernelConfig(block_m, 128, 8, 5)
    # The scores and the accumulator pass through shared memory between the two products.
    fixed = block_m * max(block_d, 128) * 4
    candidates = [(128, 3), (128, 2), (64, 2), (32, 2), (16, 2), (16, 1)]
    if itemsize == 4 or block_m > 64:
        candidates = candidates[2:]
    block_n, num_stages = candidates[_fit(arch, candidates, fixed, row_bytes)]
    return KernelConfig(
        block_m, block_n, 8 if block_m > 32 else 4, num_stages, 2 if arch == "sm_90" else 1
    )


def prefill_config(
    arch: str, rows: int, head_dim: int, itemsize: int, biased: bool = False
) -> KernelConfig:
    """Configuration of the query-tile kernel; `rows` is the longest request's row count.

    With a relative bias (`biased`) small tiles win: several programs a multiprocessor hide
    each other's loads of it. H200, 1 x 4,096 tokens, 64 heads, head_dim 128: 271 TFLOP/s with
    64 x 64 tiles, 255 with 128 x 128; without bias 403 and 415.
    """
    if arch == INTERPRETER:
        return KernelConfig(16, 16, 4, 1)
    block_d = max(16, next_power_of_2(head_dim))
    row_bytes = block_d * itemsize
    small = rows <= 64 or itemsize == 4 or block_d > 128 or biased
    block_m = 64 if small else 128
    if arch.startswith("gfx"):
        return KernelConfig(block_m, 32 if itemsize == 4 else 64, 4, 1)
    candidates = [(128, 3), (128, 2), (64, 2), (32, 2), (16, 2), (16, 1)]
    if arch not in ("sm_90", "sm_100", "sm_103", "sm_110") or block_m < 128:
        candidates = candidates[2:]
    if itemsize == 4:
        candidates = [c for c in candidates if c[0] <= 32]
    block_n, num_stages = candidates[_fit(arch, candidates, block_m * row_bytes, row_bytes)]
    return KernelConfig(block_m, block_n, 8 if block_m == 128 else 4, num_stages)
