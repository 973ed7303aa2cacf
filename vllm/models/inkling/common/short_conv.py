# SPDX-License-Identifier: Apache-2.0
"""Inkling's short convolutions and the paged state they need.

For each of four streams a layer (K, V, attention output, MLP output), with taps
w (C, k) and float32 sums:

    SC(u)[t, c] = u[t, c] + sum_j w[c, j] * u[t - (k-1) + j, c],   u = 0 before position 0

so a step needs the k-1 raw inputs before its first token. They lie in a KV cache
group of their own, (num_blocks, rows_per_block, conv_width): a row a position,
`row = position % rows_per_block` within the block of that position. Addressed by
absolute position, the state follows chunked prefill, prefix hits, preemption and
the rejection of drafts without further ado.
"""

from __future__ import annotations

import dataclasses

import torch

from vllm.attention.metadata import ForwardContext


@dataclasses.dataclass(frozen=True)
class ConvPlan:
    """Where a step's convolutions read and write; the same for every layer and stream."""

    past_slots: torch.Tensor
    """(num_reqs, k-1) rows of the inputs before each request's first token, oldest first; -1
    before position 0."""
    past_index: torch.Tensor | None
    """(num_reqs * (k-1),) places of those inputs on the extended token axis; None in a pure
    decode step."""
    token_index: torch.Tensor | None
    """(num_tokens,) places of this step's tokens on the extended axis."""
    request_of: torch.Tensor | None
    """(num_tokens,) request of each token; None in a pure decode step. There no slot that is
    read is written, since a block has k rows at least or one for each of its positions."""
    starts: torch.Tensor
    """(num_reqs + 1,) first token of each request."""
    slot_mapping: torch.Tensor
    """(num_tokens,) rows that this step's inputs are stored in; see GroupMetadata."""


def make_conv_plan(fwd: ForwardContext, group: int, taps: int, rows_per_block: int) -> ConvPlan:
    """The step's plan, made once and kept in `fwd.derived`."""
    key = f"conv_plan_{group}"
    if key not in fwd.derived:
        fwd.derived[key] = _build(fwd, group, taps - 1, rows_per_block)
    return fwd.derived[key]


def _build(fwd: ForwardContext, group: int, reach: int, rows: int) -> ConvPlan:
    device = fwd.positions.device
    starts = fwd.query_start_loc.long()  # (num_reqs + 1,)
    counts = starts[1:] - starts[:-1]
    first = fwd.seq_lens.long() - counts  # position of each request's first token
    back = torch.arange(-reach, 0, device=device)
    past = first[:, None] + back  # (num_reqs, k-1)
    table = fwd.groups[group].block_table
    blocks = table.gather(1, past.clamp(min=0) // fwd.block_size).long()
    valid = (past >= 0) & (counts > 0)[:, None]
    past_slots = torch.where(valid, blocks * rows + past % rows, -1)
    past_index = token_index = request_of = None
    if fwd.num_decode_reqs != fwd.num_reqs:
        # Extended axis: each request's k-1 past inputs, then its tokens.
        requests = torch.arange(fwd.num_reqs, device=device)
        past_index = (starts[:-1, None] + requests[:, None] * reach + back + reach).flatten()
        tokens = torch.arange(fwd.num_tokens, device=device)
        request_of = torch.bucketize(tokens, starts[1:], right=True).clamp(max=fwd.num_reqs - 1)
        token_index = tokens + (request_of + 1) * reach
    slots = fwd.groups[group].slot_mapping
    return ConvPlan(past_slots, past_index, token_index, request_of, starts, slots)


def short_conv(
    u: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, plan: ConvPlan
) -> torch.Tensor:
    """SC(u), and the raw inputs stored for the next step.

    u: (num_tokens, C) raw inputs. weight: (C, k) float32. state: (num_slots, C), the
    stream's columns of the layer's cache, updated in place. Returns (num_tokens, C) in
    u's dtype.
    """
    if u.is_cuda:
        from vllm.models.inkling.common.ops import short_conv as ops

        slots = plan.slot_mapping
        return ops.short_conv(
            u, weight, state, plan.past_slots, plan.request_of, plan.starts, slots
        )
    reach = weight.shape[1] - 1
    valid = (plan.past_slots >= 0)[..., None]
    past = torch.where(valid, state[plan.past_slots.clamp(min=0)], state.new_zeros(()))
    if plan.past_index is None:  # one token a request
        taps = torch.cat([past.float(), u.float()[:, None]], 1)  # (num_tokens, k, C)
        out = u.float() + torch.einsum("tkc,ck->tc", taps, weight)
    else:
        assert plan.token_index is not None
        extended = u.new_zeros(len(u) + plan.past_index.numel(), u.shape[1], dtype=torch.float32)
        extended[plan.past_index] = past.flatten(0, 1).float()
        extended[plan.token_index] = u.float()
        out = u.float()
        for j in range(reach + 1):
            out = out + extended[plan.token_index - (reach - j)] * weight[:, j]
    store_rows(u, state, plan.slot_mapping)
    return out.to(u.dtype)


def store_rows(u: torch.Tensor, state: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write rows of `u` whose slot is not -1; the others go to the null block's first row."""
    state[slot_mapping.clamp(min=0)] = u.to(state.dtype)
