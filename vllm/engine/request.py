# SPDX-License-Identifier: Apache-2.0
"""One sequence inside the core: its tokens, its progress, its blocks, when it must stop."""

from __future__ import annotations

import enum
from typing import Protocol

from vllm.engine.messages import EngineCoreRequest, FinishReason


class RequestStatus(enum.IntEnum):
    """Where a request is; PREEMPTED waits like WAITING but has been seen by the workers."""

    WAITING = 0
    PREEMPTED = 1
    RUNNING = 2
    FINISHED = 3


class Grammar(Protocol):
    """What the scheduler asks of a constraint on the output (vllm.sampling.structured)."""

    def accept(self, token_ids: list[int]) -> bool:
        """Advance by sampled tokens; False if the constraint forbids one of them."""

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of these drafted tokens, from the first, the constraint allows."""

    def bitmask_rows(self, draft_token_ids: list[int]) -> bytes:
        """Packed masks for the next position and after each draft, 1 + len(drafts) rows."""

    @property
    def terminated(self) -> bool:
        """Whether the text is complete: nothing but the end of text may follow."""

    @property
    def error(self) -> str:
        """After a failed `accept`: what went wrong."""


class Request:
    """A sequence in the scheduler.

    `num_computed_tokens` counts what has been handed to the workers, so with steps in
    flight it runs ahead of the results; `num_confirmed_tokens` follows with the results.
    `num_in_flight` is the number of sampled tokens whose ids have not come back yet.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "block_tables",
        "cache_salt",
        "capacity",
        "draft_token_ids",
        "eos_token_ids",
        "first_held_block",
        "grammar",
        "max_total_tokens",
        "min_total_tokens",
        "next_publish_at",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_confirmed_tokens",
        "num_in_flight",
        "num_prompt_logprobs_sent",
        "num_prompt_tokens",
        "num_published_blocks",
        "order",
        "priority",
        "reported",
        "request_id",
        "sampling_params",
        "scheduled_time",
        "status",
        "stop_ids",
        "token_ids",
        "wants_prompt_logprobs",
    )

    def __init__(
        self,
        message: EngineCoreRequest,
        max_model_len: int,
        grammar: Grammar | None = None,
    ) -> None:
        params = message.sampling_params
        self.request_id = message.request_id
        self.sampling_params = params
        self.arrival_time = message.arrival_time
        self.priority = message.priority
        self.cache_salt = message.cache_salt
        self.order = 0
        self.grammar = grammar
        self.status = RequestStatus.WAITING

        self.token_ids = list(message.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_confirmed_tokens = 0
        self.num_in_flight = 0
        self.draft_token_ids: list[int] = []

        room = max_model_len - self.num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self.max_total_tokens = self.num_prompt_tokens + max_tokens
        self.min_total_tokens = self.num_prompt_tokens + params.min_tokens
        eos = () if params.ignore_eos else params.eos_token_ids or ()
        self.eos_token_ids = frozenset(eos)
        self.stop_ids = self.eos_token_ids.union(params.stop_token_ids or ())

        # Owned by KVCacheManager: one table a group, all of the same length.
        self.block_tables: list[list[int]] = []
        self.block_hashes: list[bytes] = []
        self.capacity = 0
        """Tokens that the blocks held now have room for."""
        self.first_held_block: list[int] = []
        self.num_published_blocks = 0
        self.next_publish_at = 0

        self.num_cached_tokens = -1
        self.scheduled_time: float | None = None
        self.reported = False
        self.wants_prompt_logprobs = params.prompt_logprobs is not None
        self.num_prompt_logprobs_sent = 0

    @property
    def num_tokens(self) -> int:
        """Known tokens and those being sampled."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output_tokens(self) -> int:
        """Known tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether prompt log-probabilities are owed, which only computing the prompt gives."""
        return (
            self.wants_prompt_logprobs
            and self.num_prompt_logprobs_sent < self.num_prompt_tokens - 1
        )

    @property
    def finished(self) -> bool:
        """Whether the request has ended and holds nothing."""
        return self.status is RequestStatus.FINISHED

    def append(self, token_ids: list[int]) -> tuple[list[int], FinishReason | None, int | None]:
        """Take sampled tokens one by one until one ends the request.

        Returns the tokens taken, why it ended (None: it goes on), and the stop token id
        unless it was the end of text.
        """
        for taken, token in enumerate(token_ids, start=1):
            self.token_ids.append(token)
            total = len(self.token_ids)
            if token in self.stop_ids and total >= self.min_total_tokens:
                stop_reason = None if token in self.eos_token_ids else token
                return token_ids[:taken], FinishReason.STOP, stop_reason
            if self.grammar is not None:
                if not self.grammar.accept([token]):
                    return token_ids[:taken], FinishReason.ERROR, None
                if self.grammar.terminated:
                    return token_ids[:taken], FinishReason.STOP, None
            if total >= self.max_total_tokens:
                return token_ids[:taken], FinishReason.LENGTH, None
        return token_ids, None, None
