# SPDX-License-Identifier: Apache-2.0
"""What a KV cache holds: groups of layers with equal needs, their bytes, their block counts.

A *group* is the set of layers that share a block table. All groups use the same
`block_size` (tokens a block stands for), so one block hash serves them all; they
differ in how far back they are read (`window`) and in how many rows of a block
are stored (`rows_per_block`). Torch-free: preflight plans with the same records
that the worker allocates from.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

GroupKind = Literal["full", "sliding", "conv"]


@dataclasses.dataclass(frozen=True)
class LayerCacheSpec:
    """One layer's rows in the cache, on one rank.

    Attention layers keep K and V rows of (num_kv_heads, head_dim) each;
    a convolution layer keeps one row of `conv_width` values.
    """

    name: str
    """Key of the layer in the worker, such as "layers.3.attn"."""
    dtype_bytes: int
    num_kv_heads: int = 0
    head_dim: int = 0
    conv_width: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes that one token's row takes in this layer."""
        values = 2 * self.num_kv_heads * self.head_dim + self.conv_width
        return values * self.dtype_bytes


@dataclasses.dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share one block table."""

    kind: GroupKind
    layers: tuple[LayerCacheSpec, ...]
    window: int | None = None
    """Rows that a query at position p reads: p - window + 1 ... p; None: all from 0.
    For a convolution of k taps this is k."""
    rows_per_block: int | None = None
    """Rows stored of each block, as a ring over position mod rows; None: all of them."""

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers of the group."""
        rows = self.rows_per_block or block_size
        return rows * sum(layer.row_bytes for layer in self.layers)

    def first_needed_block(self, num_computed_tokens: int, block_size: int) -> int:
        """Index of the first block that the query at `num_computed_tokens` still reads."""
        if self.window is None:
            return 0
        return max(0, num_computed_tokens - self.window + 1) // block_size

    def blocks_per_sequence(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """Most blocks that a sequence of `num_tokens` holds, prefilled `chunk` tokens a step."""
        total = math.ceil(num_tokens / block_size)
        if self.window is None:
            return total
        span = self.window - 1 + min(chunk, num_tokens)
        return min(total, math.ceil(span / block_size) + 1)


@dataclasses.dataclass(frozen=True)
class KVCacheConfig:
    """Groups and the number of blocks each has; block 0 of every group is the null block."""

    block_size: int
    groups: tuple[KVCacheGroup, ...]
    num_blocks: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all groups on one rank."""
        return sum(
            n * g.block_bytes(self.block_size)
            for n, g in zip(self.num_blocks, self.groups, strict=True)
        )


def sequence_bytes(
    groups: tuple[KVCacheGroup, ...], block_size: int, num_tokens: int, chunk: int
) -> int:
    """Cache bytes that one sequence of `num_tokens` needs on one rank."""
    return sum(
        g.blocks_per_sequence(num_tokens, block_size, chunk) * g.block_bytes(block_size)
        for g in groups
    )
