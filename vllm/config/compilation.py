# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs."""

from __future__ import annotations

import dataclasses

from vllm.config.fields import option, raise_usage, wrong_value


@dataclasses.dataclass
class CompilationConfig:
    """CUDA graphs."""

    cudagraph_capture_sizes: list[int] | None = option(None)
    """Batch sizes whose decode step is captured; unset: 1, 2, 4 and multiples of 8."""

    def __post_init__(self) -> None:
        sizes = self.cudagraph_capture_sizes
        if sizes is not None and any(type(s) is not int or s < 1 for s in sizes):
            raise_usage([wrong_value("--cudagraph-capture-sizes", sizes, "numbers from 1")])

    def sizes_up_to(self, limit: int) -> list[int]:
        """Batch sizes to capture, ascending; the last one is at least `limit` if not set."""
        if self.cudagraph_capture_sizes is not None:
            return sorted({s for s in self.cudagraph_capture_sizes if s <= limit})
        sizes = [s for s in (1, 2, 4) if s < limit] + list(range(8, limit, 8))
        return [*sizes, limit]
