# SPDX-License-Identifier: Apache-2.0
"""Short convolutions over a step's tokens and the cached inputs before them, on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.layers.ops.chips import dependent_launch


@triton.jit(do_not_specialize=["num_tokens"])
def short_conv_kernel(
    out_ptr,
    u_ptr,
    taps_ptr,
    state_ptr,
    slots_ptr,
    past_ptr,
    past_slots_ptr,
    request_of_ptr,
    starts_ptr,
    num_tokens,
    stride_u,
    stride_state,
    stride_past,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """BLOCK_C channels of BLOCK_T tokens; DECODE: request t has token t alone."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = token < num_tokens
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = (channels < C)[None, :]
    if DECODE:
        request = token
        offset = token * 0
    else:
        request = tl.load(request_of_ptr + token, mask=real, other=0)
        offset = token - tl.load(starts_ptr + request, mask=real, other=0)
    u_ptrs = u_ptr + token[:, None] * stride_u + channels[None, :]
    raw = tl.load(u_ptrs, mask=live & real[:, None], other=0.0)
    now = raw.to(tl.float32)
    out = now
    for j in tl.static_range(TAPS):
        tap = tl.load(taps_ptr + channels * TAPS + j, mask=channels < C, other=0.0)
        if j == TAPS - 1:
            value = now
        else:
            # Input j lies TAPS - 1 - j tokens back: of this step, or the past's row offset + j.
            row = offset + j
            is_past = real & (row < TAPS - 1)
            place = request * (TAPS - 1) + row
            slot = tl.load(past_slots_ptr + place, mask=is_past, other=-1)
            cached = past_ptr + slot[:, None] * stride_past + channels[None, :]
            mask = live & (slot >= 0)[:, None]
            value = tl.load(cached, mask=mask, other=0.0).to(tl.float32)
            if not DECODE:
                recent = u_ptrs - (TAPS - 1 - j) * stride_u
                mask = live & (real & (row >= TAPS - 1))[:, None]
                value += tl.load(recent, mask=mask, other=0.0).to(tl.float32)
        out += value * tap[None, :]
    out_ptrs = out_ptr + token[:, None] * C + channels[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=live & real[:, None])
    slot = tl.load(slots_ptr + token, mask=real, other=-1)
    state_ptrs = state_ptr + slot[:, None] * stride_state + channels[None, :]
    tl.store(state_ptrs, raw.to(state_ptr.dtype.element_ty), mask=live & (slot >= 0)[:, None])


def short_conv(
    u: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    past_slots: torch.Tensor,
    request_of: torch.Tensor | None,
    starts: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """As `common.short_conv.short_conv`, which see for the arguments.

    The last axes of u and state must be contiguous, the rest dense. `request_of` is None where
    token t is all that request t has; no slot that is read is written then.
    """
    num_tokens, width = u.shape
    out = torch.empty((num_tokens, width), dtype=u.dtype, device=u.device)
    past = state
    if request_of is not None:  # one program may write what another one has yet to read
        flat = past_slots.flatten()
        past = state[flat.clamp(min=0)]
        past_slots = torch.where(flat >= 0, torch.arange(len(flat), device=u.device), -1)
    block_t, block_c = (1, 512) if request_of is None else (16, 128)
    short_conv_kernel[(triton.cdiv(num_tokens, block_t), triton.cdiv(width, block_c))](
        out,
        u,
        weight,
        state,
        slot_mapping,
        past,
        past_slots,
        starts if request_of is None else request_of,
        starts,
        num_tokens,
        u.stride(0),
        state.stride(0),
        past.stride(0),
        C=width,
        TAPS=weight.shape[1],
        DECODE=request_of is None,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        num_warps=2 if request_of is None else 4,
        **dependent_launch(u.device),
    )
    return out
