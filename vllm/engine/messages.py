# SPDX-License-Identifier: Apache-2.0
"""Messages between front end and core, and between core and workers (msgspec structs).

Front end -> core: `EngineCoreRequest`, aborts. Core -> front end: `EngineCoreOutputs`.
Core -> workers, once a step: `SchedulerOutput`. Workers -> core: `ModelRunnerOutput`.
"""

from __future__ import annotations

import enum

import msgspec

from vllm.sampling_params import SamplingParams


class FinishReason(enum.IntEnum):
    """Why a request ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One sequence to run (n > 1 is already fanned out into several)."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    """Monotonic seconds of the front end."""
    priority: int = 0
    cache_salt: str | None = None


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position: the chosen token first, then the top-k.

    `token_ids`, `logprobs` (natural log) and `ranks` (from 1) have equal lengths.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step brought for one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id; with FinishReason.ERROR "invalid-request" (the client's fault, a 400),
    "grammar" or "internal-error"."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry for each new token."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Entries for prompt positions 1.. in order, sent in pieces as chunks are computed."""
    num_cached_tokens: int = 0
    error: str | None = None
    """With FinishReason.ERROR: why this request alone failed."""
    scheduled_time: float | None = None
    """Monotonic seconds at which the request was first scheduled; with its first output."""


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """Gauges and counters of one step for /metrics."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1 (the fullest group)."""
    prefix_cache_queries: int = 0
    """Prompt tokens looked up since the last report."""
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_drafts: int = 0
    accepted_per_position: list[int] = []


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Everything that one step brought."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats | None = None
    timestamp: float = 0.0


class NewRequestData(msgspec.Struct, array_like=True, gc=False):
    """A request that the workers see for the first time, or again after preemption."""

    request_id: str
    token_ids: list[int]
    """Prompt, and after a preemption the tokens generated so far."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    block_ids: list[list[int]]
    """For each KV cache group; block 0 stands for "freed or behind the window"."""
    num_computed_tokens: int


class CachedRequestData(msgspec.Struct, array_like=True, gc=False):
    """A request that the workers know: what changed since the last step."""

    request_id: str
    new_block_ids: list[list[int]]
    """Blocks appended to each group's table in this step."""
    num_computed_tokens: int


class SchedulerOutput(msgspec.Struct, array_like=True, gc=False):
    """One step's work, decode requests first."""

    step: int
    new_requests: list[NewRequestData]
    cached_requests: list[CachedRequestData]
    num_scheduled_tokens: dict[str, int]
    """Tokens to compute for each request, in batch order; includes draft tokens."""
    draft_token_ids: dict[str, list[int]]
    """Draft tokens to verify; [-1, ...] stands for "the ids the worker drafted itself"."""
    finished_request_ids: list[str]
    """Requests that ended or were preempted since the last step: forget their state."""
    total_num_scheduled_tokens: int
    grammar_bitmask: bytes | None = None
    """Packed int32 rows, (len(grammar_request_ids), ceil(vocab / 32)), 1 = allowed."""
    grammar_request_ids: list[str] = []
    """Whose each row is; a request with k drafts has 1 + k rows, one a sampled position."""


class ModelRunnerOutput(msgspec.Struct, array_like=True, gc=False):
    """What a step computed, in the batch order of its SchedulerOutput."""

    request_ids: list[str]
    sampled_token_ids: list[list[int]]
    """Per request: [] while its prompt is not finished, one token, or with speculation the
    accepted drafts and one more."""
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    draft_token_ids: dict[str, list[int]] = {}
    """Drafts for the next step."""
    errors: dict[str, str] = {}
    """Requests that failed alone (non-finite logits), with the reason."""
