# SPDX-License-Identifier: Apache-2.0
"""What attention and convolutions must know of a step, built once and shared by all layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass
class GroupMetadata:
    """A KV cache group's part: where this step's rows go and where past rows lie."""

    block_table: torch.Tensor
    """(num_reqs, max_blocks) int32; 0 for blocks that are not there."""
    slot_mapping: torch.Tensor
    """(num_tokens,) int64, block * rows_per_block + row; -1 for padding and for rows that
    this step need not store."""


@dataclasses.dataclass
class ForwardContext:
    """One forward pass, decode requests (one query token each) first.

    The tensors may be views of persistent buffers that the next step overwrites;
    with CUDA graphs they are padded and `num_reqs` counts the padding, whose
    seq_lens are 0. Nobody but the runner writes them.
    """

    positions: torch.Tensor
    """(num_tokens,) int64."""
    query_start_loc: torch.Tensor
    """(num_reqs + 1,) int32 offsets into the token axis."""
    seq_lens: torch.Tensor
    """(num_reqs,) int32 keys of each request, this step's included."""
    num_reqs: int
    num_tokens: int
    num_decode_reqs: int
    """The first requests with exactly one query token each."""
    max_query_len: int
    max_seq_len: int
    """Upper bound of seq_lens, known on the host."""
    groups: list[GroupMetadata]
    """In the order of KVCacheConfig.groups."""
    block_size: int
    query_start_loc_cpu: torch.Tensor | None = None
    """The same on the host, where a backend loops over requests; None in a CUDA graph."""
    seq_lens_cpu: torch.Tensor | None = None
    derived: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What layers compute from the rest once a step and share (gather indices, masks)."""
