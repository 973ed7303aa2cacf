# SPDX-License-Identifier: Apache-2.0
"""What the worker keeps of each request: tokens, block tables, sampling options, by row.

A request stays in one row of persistent arrays from its first step to its last, so a step
costs a few vectorised operations whatever the batch. Rows are not in batch order; a step
gathers them through an index.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vllm.config.kv_cache import KVCacheConfig
from vllm.engine.messages import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.sampling_params import SamplingParams


@dataclasses.dataclass
class RequestState:
    """The parts of a request that are not numbers."""

    request_id: str
    row: int
    params: SamplingParams
    num_prompt_tokens: int
    num_blocks: list[int]
    """Filled columns of each group's block table."""


@dataclasses.dataclass
class StepRows:
    """A step's requests as arrays, in batch order, and its tokens as flat arrays."""

    requests: list[RequestState]
    rows: np.ndarray
    """(num_reqs,) rows of the persistent arrays."""
    counts: np.ndarray
    """(num_reqs,) tokens to compute."""
    starts: np.ndarray
    """(num_reqs,) tokens computed before."""
    offsets: np.ndarray
    """(num_reqs + 1,) places on the token axis."""
    request_of: np.ndarray
    """(num_tokens,) index into `requests`."""
    positions: np.ndarray
    """(num_tokens,)."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return int(self.offsets[-1])


class InputBatch:
    """Persistent arrays of up to `max_num_seqs` requests."""

    def __init__(self, kv_config: KVCacheConfig, max_num_seqs: int, max_model_len: int) -> None:
        self.kv_config = kv_config
        self.block_size = kv_config.block_size
        max_blocks = -(-max_model_len // self.block_size) + 1
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        """Known tokens, one on its way from the device included."""
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_tables = [
            np.zeros((max_num_seqs, max_blocks), dtype=np.int32) for _ in kv_config.groups
        ]
        self.requests: dict[str, RequestState] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.generation = 0
        """Changes with every arrival and departure; what is derived of rows keeps it."""

    def update(self, step: SchedulerOutput) -> None:
        """Follow the scheduler: who left, who came, who got blocks."""
        for request_id in step.finished_request_ids:
            self._remove(request_id)
        for new in step.new_requests:
            self._add(new)
        for cached in step.cached_requests:
            self._grow(cached)

    def _remove(self, request_id: str) -> None:
        state = self.requests.pop(request_id, None)
        if state is None:
            return
        for table in self.block_tables:
            table[state.row] = 0
        self._free_rows.append(state.row)
        self.generation += 1

    def _add(self, new: NewRequestData) -> None:
        self._remove(new.request_id)
        row = self._free_rows.pop()
        count = len(new.token_ids)
        self.token_ids[row, :count] = new.token_ids
        self.num_tokens[row] = count
        self.num_computed[row] = new.num_computed_tokens
        for table, blocks in zip(self.block_tables, new.block_ids, strict=True):
            table[row, : len(blocks)] = blocks
        self.requests[new.request_id] = RequestState(
            new.request_id,
            row,
            new.sampling_params,
            new.num_prompt_tokens,
            [len(blocks) for blocks in new.block_ids],
        )
        self.generation += 1

    def _grow(self, cached: CachedRequestData) -> None:
        state = self.requests[cached.request_id]
        self.num_computed[state.row] = cached.num_computed_tokens
        for index, blocks in enumerate(cached.new_block_ids):
            if blocks:
                first = state.num_blocks[index]
                self.block_tables[index][state.row, first : first + len(blocks)] = blocks
                state.num_blocks[index] = first + len(blocks)

    def step_rows(self, step: SchedulerOutput) -> StepRows:
        """The step's tokens as arrays."""
        requests = [self.requests[i] for i in step.num_scheduled_tokens]
        rows = np.fromiter((r.row for r in requests), np.int64, len(requests))
        counts = np.fromiter(step.num_scheduled_tokens.values(), np.int64, len(requests))
        starts = self.num_computed[rows]
        offsets = np.zeros(len(requests) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        if offsets[-1] == len(requests):
            request_of, positions = np.arange(len(requests)), starts
        else:
            request_of = np.repeat(np.arange(len(requests)), counts)
            positions = np.arange(offsets[-1]) - (offsets[:-1] - starts)[request_of]
        return StepRows(requests, rows, counts, starts, offsets, request_of, positions)

    def slot_mapping(self, group: int, step: StepRows) -> np.ndarray:
        """(num_tokens,) cache rows; -1 where a later token of the step takes the same row."""
        spec, size = self.kv_config.groups[group], self.block_size
        rows = spec.rows_per_block or size
        columns = step.positions // size
        blocks = self.block_tables[group][step.rows[step.request_of], columns]
        slots = blocks.astype(np.int64) * rows + step.positions % rows
        if rows < size and step.num_tokens > len(step.requests):
            successor = step.positions + rows
            ends = (step.starts + step.counts)[step.request_of]
            overtaken = (successor < ends) & (successor // size == columns)
            slots[overtaken] = -1
        return slots

    def append(self, row: int, tokens: list[int]) -> None:
        """Tokens that were sampled."""
        count = int(self.num_tokens[row])
        self.token_ids[row, count : count + len(tokens)] = tokens
        self.num_tokens[row] = count + len(tokens)
