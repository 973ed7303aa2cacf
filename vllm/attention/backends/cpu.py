# SPDX-License-Identifier: Apache-2.0
"""Attention on the CPU: the C++ kernel where it was built and has the head width, else torch.

In torch all decoding requests are computed at once, prompts one by one. A decode step gathers
each request's rows into a padded (requests, keys) batch; the query heads that share a KV head
take the place of query positions, so that no key is copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from vllm.attention.metadata import ForwardContext, GroupMetadata
from vllm.attention.ops.cpu_attention import can_attend, paged_attention

if TYPE_CHECKING:
    from vllm.layers.attention import Attention


class CpuAttention:
    """CPU_ATTN."""

    def store(
        self, layer: Attention, k: torch.Tensor, v: torch.Tensor, group: GroupMetadata
    ) -> None:
        """Write rows to their slots."""
        layer.k_rows.index_copy_(0, group.slot_mapping, k)
        layer.v_rows.index_copy_(0, group.slot_mapping, v)

    def attend(
        self,
        layer: Attention,
        q: torch.Tensor,
        fwd: ForwardContext,
        group: GroupMetadata,
        rel_logits: torch.Tensor | None,
    ) -> torch.Tensor:
        """(num_tokens, heads, head_dim)."""
        if can_attend(q.dtype, layer.head_dim):
            return paged_attention(
                q,
                layer.k_cache,
                layer.v_cache,
                group.block_table,
                fwd.seq_lens,
                fwd.query_start_loc,
                layer.scale,
                layer.window,
                rel_logits,
            )
        split = fwd.num_decode_reqs
        if split == fwd.num_reqs:
            return _decode(layer, q, fwd, group, rel_logits, split)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if split:
            bias = None if rel_logits is None else rel_logits[:split]
            out[:split] = _decode(layer, q[:split], fwd, group, bias, split)
        assert fwd.query_start_loc_cpu is not None and fwd.seq_lens_cpu is not None
        starts, lengths = fwd.query_start_loc_cpu.tolist(), fwd.seq_lens_cpu.tolist()
        for request in range(split, fwd.num_reqs):
            first, last = starts[request], starts[request + 1]
            if last > first:
                bias = None if rel_logits is None else rel_logits[first:last]
                blocks = group.block_table[request]
                out[first:last] = _prefill(layer, q[first:last], blocks, lengths[request], bias)
        return out


def _decode(
    layer: Attention,
    q: torch.Tensor,
    fwd: ForwardContext,
    group: GroupMetadata,
    rel_logits: torch.Tensor | None,
    num_reqs: int,
) -> torch.Tensor:
    """One query token for each of the first `num_reqs` requests."""
    key = f"decode_{layer.group}"
    if key not in fwd.derived:
        fwd.derived[key] = _decode_plan(layer, fwd, group, num_reqs)
    rows, mask, distance = fwd.derived[key]
    heads, head_dim = layer.num_kv_heads, layer.head_dim
    shape = (num_reqs, -1, heads, head_dim)
    k = layer.k_rows.index_select(0, rows).view(shape).transpose(1, 2)
    v = layer.v_rows.index_select(0, rows).view(shape).transpose(1, 2)
    grouped = q.view(num_reqs, heads, -1, head_dim)
    if rel_logits is not None:
        bias = _bias(rel_logits, distance[:, None]).view(num_reqs, heads, -1, mask.shape[-1])
        mask = bias.masked_fill(~mask, float("-inf"))
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=layer.scale)
    return out.reshape(num_reqs, -1, head_dim)


def _decode_plan(
    layer: Attention, fwd: ForwardContext, group: GroupMetadata, num_reqs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cache rows (requests * keys,), mask (requests, 1, 1, keys), distance (requests, keys).

    Keys that a request does not have are read from the null block, which nobody writes, so
    that what others left in a block cannot reach a result, not even as 0 * NaN.
    """
    lengths, size = fwd.seq_lens[:num_reqs].long(), fwd.block_size
    first, count = lengths.new_zeros(num_reqs), fwd.max_seq_len
    if layer.window is not None and layer.window < count:
        first, count = (lengths - layer.window).clamp(min=0), layer.window
    keys = first[:, None] + torch.arange(count)
    distance = lengths[:, None] - 1 - keys
    mask = distance >= 0
    table = group.block_table[:num_reqs].long()
    blocks = table.gather(1, (keys // size).clamp(max=table.shape[1] - 1))
    rows = torch.where(mask, blocks * size + keys % size, 0)
    return rows.flatten(), mask[:, None, None], distance


def _bias(rel_logits: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """rel_logits (n, heads, extent) by distance (n, 1, keys); 0 outside the extent."""
    extent = rel_logits.shape[-1]
    index = distance.clamp(0, extent - 1).expand(-1, rel_logits.shape[1], -1)
    inside = (distance >= 0) & (distance < extent)
    return rel_logits.gather(-1, index).masked_fill(~inside, 0.0)


def _prefill(
    layer: Attention,
    q: torch.Tensor,
    blocks: torch.Tensor,
    length: int,
    rel_logits: torch.Tensor | None,
) -> torch.Tensor:
    """The last rows of one request, `length` keys in all."""
    size = layer.k_cache.shape[1]
    rows = q.shape[0]
    first = 0
    if layer.window is not None:
        first = max(0, length - rows - layer.window + 1) // size
    table = blocks[first : -(-length // size)]
    keys = slice(0, length - first * size)
    k = layer.k_cache[table].flatten(0, 1)[keys].transpose(0, 1)[None]
    v = layer.v_cache[table].flatten(0, 1)[keys].transpose(0, 1)[None]
    query = q.transpose(0, 1)[None]
    share = layer.num_heads != layer.num_kv_heads
    if rel_logits is None and rows == length and (layer.window is None or layer.window >= length):
        out = F.scaled_dot_product_attention(
            query, k, v, is_causal=True, scale=layer.scale, enable_gqa=share
        )
        return out[0].transpose(0, 1)
    positions = torch.arange(length - rows, length)[:, None]
    distance = positions - torch.arange(first * size, length)
    mask = distance >= 0
    if layer.window is not None:
        mask &= distance < layer.window
    if rel_logits is not None:
        bias = _bias(rel_logits, distance[:, None]).transpose(0, 1)  # (heads, rows, keys)
        mask = bias.masked_fill(~mask, float("-inf"))[None]
    out = F.scaled_dot_product_attention(
        query, k, v, attn_mask=mask, scale=layer.scale, enable_gqa=share
    )
    return out[0].transpose(0, 1)
