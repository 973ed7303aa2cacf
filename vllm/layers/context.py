# SPDX-License-Identifier: Apache-2.0
"""What a model's layers are built with."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from vllm.config.kv_cache import KVCacheGroup

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import TensorParallelGroup


@dataclasses.dataclass(frozen=True)
class BuildContext:
    """Facts that every layer's constructor may need; handed down, never global."""

    hf_config: dict[str, Any]
    """config.json as read (for GGUF: the equivalent built from its metadata)."""
    dtype: torch.dtype
    device: torch.device
    tp: TensorParallelGroup
    attention_backend: str
    """vLLM's backend name: CPU_ATTN, TRITON_ATTN, FLASH_ATTN."""
    groups: tuple[KVCacheGroup, ...]
    """KV cache groups; `group_of` finds a layer's."""
    requested_backend: str | None = None
    """The user's own choice of a backend: that alone lifts a restriction."""
    num_draft_tokens: int = 0
    """Tokens that the checkpoint's draft head looks ahead; 0: it is not built."""

    def group_of(self, layer_name: str) -> int:
        """Index of the group that holds `layer_name`; KeyError if none does."""
        for index, group in enumerate(self.groups):
            if any(layer.name == layer_name for layer in group.layers):
                return index
        raise KeyError(layer_name)
