# SPDX-License-Identifier: Apache-2.0
"""Which attention implementation runs."""

from __future__ import annotations

import dataclasses

from vllm.config.fields import derived, option


@dataclasses.dataclass
class AttentionConfig:
    """Attention."""

    backend: str | None = option(None, flag="--attention-backend")
    """FLASH_ATTN, TRITON_ATTN or CPU_ATTN; unset: the best that the device supports."""
    resolved_backend: str = derived("")
    """The choice."""
    rejected: dict[str, str] = derived()
    """Why the other backends were not taken."""

    def __post_init__(self) -> None:
        if self.backend is not None:
            self.backend = self.backend.upper()
