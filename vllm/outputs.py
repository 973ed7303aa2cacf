# SPDX-License-Identifier: Apache-2.0
"""What a finished or running request looks like to a caller; field names as in vLLM."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Logprob:
    """One candidate token: natural-log probability, rank from 1, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


SampleLogprobs = list[dict[int, Logprob]]
PromptLogprobs = list[dict[int, Logprob] | None]


@dataclasses.dataclass
class CompletionOutput:
    """One of the `n` continuations of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    """None while running, else "stop", "length" or "abort"."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the text; None for the end-of-text token."""

    def finished(self) -> bool:
        """Whether this continuation has ended."""
        return self.finish_reason is not None


@dataclasses.dataclass
class RequestMetrics:
    """Times of one request in seconds on the monotonic clock."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclasses.dataclass
class RequestOutput:
    """A request's prompt and its continuations."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: PromptLogprobs | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens whose KV came from the prefix cache."""
