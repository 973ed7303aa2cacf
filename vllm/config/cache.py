# SPDX-License-Identifier: Apache-2.0
"""How much memory the KV cache gets and how it is cut into blocks."""

from __future__ import annotations

import dataclasses

from vllm.config.fields import check_values, option, raise_usage, wrong_value


@dataclasses.dataclass
class CacheConfig:
    """KV cache."""

    block_size: int | None = option(None, minimum=1)
    """Tokens in a block; unset: the attention backend's default."""
    gpu_memory_utilization: float = option(0.9)
    """Share of a GPU's memory that the engine may use in all, above 0 and at most 1."""
    kv_cache_memory_bytes: int | None = option(None, minimum=1)
    """Bytes for the KV cache on each device, in place of what utilization leaves."""
    cache_dtype: str = option("auto", choices=("auto",), flag="--kv-cache-dtype")
    """Data type of the KV cache; auto: the model's."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of prompts that begin alike."""
    num_gpu_blocks_override: int | None = option(None, minimum=2)
    """Blocks of the largest group, whatever memory there is; for tests."""

    def __post_init__(self) -> None:
        findings = check_values(self)
        share = self.gpu_memory_utilization
        if not isinstance(share, (int, float)) or not 0 < share <= 1:
            findings.append(
                wrong_value("--gpu-memory-utilization", share, "a share above 0 and at most 1")
            )
        raise_usage(findings)
