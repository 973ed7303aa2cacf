# SPDX-License-Identifier: Apache-2.0
"""Attention implementations by vLLM's names; the choice is made in vllm/platforms/attention.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from vllm.attention.metadata import ForwardContext, GroupMetadata

if TYPE_CHECKING:
    from vllm.layers.attention import Attention


class AttentionImpl(Protocol):
    """How a backend stores and attends; one object serves every layer."""

    def store(
        self, layer: Attention, k: torch.Tensor, v: torch.Tensor, group: GroupMetadata
    ) -> None:
        """Write (num_tokens, kv_heads, head_dim) rows to the slots that are not -1."""

    def attend(
        self,
        layer: Attention,
        q: torch.Tensor,
        fwd: ForwardContext,
        group: GroupMetadata,
        rel_logits: torch.Tensor | None,
    ) -> torch.Tensor:
        """(num_tokens, heads, head_dim) queries over their requests' cached keys."""


def get_attention_impl(name: str) -> AttentionImpl:
    """The implementation of a backend name; imports that one only."""
    if name == "CPU_ATTN":
        from vllm.attention.backends.cpu import CpuAttention

        return CpuAttention()
    if name == "TRITON_ATTN":
        from vllm.attention.backends.triton import TritonAttention

        return TritonAttention()
    if name == "FLASH_ATTN":
        from vllm.attention.backends.flash_attn import FlashAttention

        return FlashAttention()
    raise KeyError(name)
