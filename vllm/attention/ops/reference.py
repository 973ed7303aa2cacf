# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain torch: the specification that every kernel is tested against.

For the query at position p of its sequence, head h, with KV head h // (heads / kv_heads):

    score[s] = scale * q . k[s] + bias(p - s)      for max(0, p - window + 1) <= s <= p
    bias(d)  = rel_logits[token, h, d]             for 0 <= d < rel_extent, else 0
    out      = softmax(score) v
"""

from __future__ import annotations

import torch


def gather_keys(cache: torch.Tensor, blocks: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Rows first..end-1 of one sequence out of a paged cache.

    `cache` is (num_blocks, block_size, num_kv_heads, head_dim), `blocks` the sequence's
    block table row. Blocks before `first` are not touched: they may be freed.
    """
    block_size = cache.shape[1]
    positions = torch.arange(first, end, device=cache.device)
    return cache[blocks[positions // block_size].long(), positions % block_size]


def paged_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    rel_logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    num_decode_reqs: int = 0,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Causal attention of each request's last tokens over its paged keys, into `out`.

    Args:
        out: (num_tokens, num_heads, head_dim); every row that a request owns is written.
        q: like `out`.
        k_cache, v_cache: (num_blocks, block_size, num_kv_heads, head_dim), this step's
            tokens already in them.
        block_table: (num_reqs, max_blocks) int32.
        seq_lens: (num_reqs,) int32 keys of each request, this step's included; a request
            of 0 keys gets zeros.
        query_start_loc: (num_reqs + 1,) int32; request r owns the token rows from entry r
            to entry r + 1, and they are its last positions.
        max_query_len, max_seq_len: upper bounds, for grids of kernels; unused here.
        scale: factor of the scores.
        window: keys that a query sees, its own included; None: all.
        rel_logits: (num_tokens, num_heads, rel_extent) bias by distance, or None.
        workspace, num_decode_reqs: for kernels; unused here.
        compute_dtype: what the products, the softmax and the sums are computed in.
    """
    num_heads, num_kv_heads = q.shape[1], k_cache.shape[2]
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for r, seq_len in enumerate(lengths):
        rows = slice(starts[r], starts[r + 1])
        num_queries = rows.stop - rows.start
        if num_queries == 0:
            continue
        if seq_len == 0:
            out[rows] = 0
            continue
        first_query = seq_len - num_queries
        first_key = 0 if window is None else max(0, first_query - window + 1)
        k = gather_keys(k_cache, block_table[r], first_key, seq_len).to(compute_dtype)
        v = gather_keys(v_cache, block_table[r], first_key, seq_len).to(compute_dtype)
        group = num_heads // num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[rows].to(compute_dtype), k) * scale
        query_pos = torch.arange(first_query, seq_len, device=q.device)
        key_pos = torch.arange(first_key, seq_len, device=q.device)
        distance = query_pos[:, None] - key_pos[None, :]  # (queries, keys)
        if rel_logits is not None:
            scores = scores + _bias(rel_logits[rows].to(compute_dtype), distance)
        hidden = distance < 0
        if window is not None:
            hidden = hidden | (distance >= window)
        probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", probs, v).to(out.dtype)


def _bias(rel_logits: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """(num_heads, queries, keys) bias from (queries, num_heads, extent) and the distances."""
    extent = rel_logits.shape[-1]
    inside = (distance >= 0) & (distance < extent)
    index = distance.clamp(0, extent - 1)
    by_head = rel_logits.transpose(0, 1)  # (num_heads, queries, extent)
    bias = by_head.gather(2, index.expand(by_head.shape[0], -1, -1))
    return bias.masked_fill(~inside, 0.0)
