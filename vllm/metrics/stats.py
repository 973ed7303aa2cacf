# SPDX-License-Identifier: Apache-2.0
"""Counts and times of one engine step and of ended requests. All times in seconds."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class FinishedRequestStats:
    """One ended sequence."""

    finish_reason: str
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int
    max_tokens: int | None
    n: int
    e2e_s: float
    queued_s: float
    prefill_s: float
    decode_s: float

    @property
    def inference_s(self) -> float:
        """From first scheduled to the last token."""
        return self.prefill_s + self.decode_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean time of the tokens after the first."""
        following = self.num_generation_tokens - 1
        return self.decode_s / following if following > 0 else None


@dataclasses.dataclass
class IterationStats:
    """What one step brought over all requests."""

    num_prompt_tokens: int = 0
    """Prompt tokens of requests that got their first token."""
    num_generation_tokens: int = 0
    times_to_first_token_s: list[float] = dataclasses.field(default_factory=list)
    inter_token_latencies_s: list[float] = dataclasses.field(default_factory=list)
    finished: list[FinishedRequestStats] = dataclasses.field(default_factory=list)
