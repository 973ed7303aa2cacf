# SPDX-License-Identifier: Apache-2.0
"""An executor whose "model" is arithmetic over a real paged cache, in plain Python.

Every group is a store of rows, addressed through the block tables that the scheduler
sends. The state at position p is a hash of the token at p and of the rows that each group
reads before p; it is written back to every group's row p, and the next token is the state
modulo the vocabulary. A block that is shared wrongly, reused too early, not carried
over, or rolled back wrongly changes a state, and with it every later token.
`expected_tokens` computes the same from the plain sequence.
"""

from __future__ import annotations

import random

from vllm.config.kv_cache import KVCacheConfig, KVCacheGroup, LayerCacheSpec
from vllm.engine.messages import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput
from vllm.sampling_params import SamplingParams

VOCAB = 61
EOS = 0
_LAYER = (LayerCacheSpec("layer", 4, num_kv_heads=1, head_dim=1),)

FULL = KVCacheGroup("full", _LAYER)
SLIDING = KVCacheGroup("sliding", _LAYER, window=7)


def conv(taps: int, block_size: int, drafts: int = 0) -> KVCacheGroup:
    """A convolution group whose rows are a ring, sized as the planner does."""
    rows = 1
    while rows < taps - 1 + drafts + 1:
        rows *= 2
    return KVCacheGroup(
        "conv", _LAYER, window=taps, rows_per_block=min(rows, block_size)
    )


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    priority: int = 0,
    salt: str | None = None,
    **params,
) -> EngineCoreRequest:
    """A greedy request that ends at EOS or max_tokens."""
    params.setdefault("temperature", 0.0)
    params.setdefault("eos_token_ids", [EOS])
    return EngineCoreRequest(
        request_id,
        prompt,
        SamplingParams(**params),
        0.0,
        priority=priority,
        cache_salt=salt,
    )


def _mix(token: int, rows: list[tuple[int, ...]]) -> int:
    return hash((token, tuple(rows))) & 0x7FFFFFFF


def _next_state(token: int, states: list[int], groups: tuple[KVCacheGroup, ...]) -> int:
    rows = []
    for group in groups:
        first = 0 if group.window is None else max(0, len(states) - group.window + 1)
        rows.append(tuple(states[first:]))
    return _mix(token, rows)


def expected_tokens(
    prompt: list[int],
    params: SamplingParams,
    groups: tuple[KVCacheGroup, ...],
    limit: int,
) -> list[int]:
    """What a request must answer; `limit` is the longest sequence."""
    states: list[int] = []
    for token in prompt:
        states.append(_next_state(token, states, groups))
    output: list[int] = []
    most = limit - len(prompt)
    most = most if params.max_tokens is None else min(most, params.max_tokens)
    while len(output) < most:
        token = states[-1] % VOCAB
        output.append(token)
        stops = (() if params.ignore_eos else (EOS,)) + tuple(
            params.stop_token_ids or ()
        )
        if token in stops and len(output) >= params.min_tokens:
            break
        states.append(_next_state(token, states, groups))
    return output


class _State:
    """What the worker knows of a request."""

    def __init__(
        self, token_ids: list[int], tables: list[list[int]], computed: int
    ) -> None:
        self.token_ids = token_ids
        self.tables = tables
        self.computed = computed


class _Done:
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        return self._output


class PagedOracleExecutor:
    """Executes steps at once, in the order of their launch, as a device queue would."""

    def __init__(
        self, config: KVCacheConfig, num_drafts: int = 0, draft_accuracy: float = 0.6
    ) -> None:
        self.config = config
        self.num_drafts = num_drafts
        self.draft_accuracy = draft_accuracy
        self.rng = random.Random(7)
        self.failing: dict[str, str] = {}
        self.requests: dict[str, _State] = {}
        self.batches: list[dict[str, int]] = []
        self.stores = [
            [[-1] * (group.rows_per_block or config.block_size) for _ in range(count)]
            for group, count in zip(config.groups, config.num_blocks, strict=True)
        ]

    def shutdown(self) -> None:
        """Nothing to release."""

    def execute_model(self, work: SchedulerOutput) -> _Done:
        """Compute a step and check that its description is consistent."""
        self._follow(work)
        counts = list(work.num_scheduled_tokens.values())
        assert sum(counts) == work.total_num_scheduled_tokens
        assert counts == sorted(counts, key=lambda n: n != 1), (
            "single tokens come first"
        )
        self.batches.append(dict(work.num_scheduled_tokens))
        sampled, drafts, errors = [], {}, {}
        for request_id, count in work.num_scheduled_tokens.items():
            state = self.requests[request_id]
            proposed = work.draft_token_ids.get(request_id, [])
            tokens = self._compute(state, count, proposed)
            sampled.append(tokens)
            if request_id in self.failing:
                errors[request_id] = self.failing[request_id]
            elif tokens and self.num_drafts:
                drafts[request_id] = self._draft(state)
        return _Done(
            ModelRunnerOutput(
                list(work.num_scheduled_tokens),
                sampled,
                draft_token_ids=drafts,
                errors=errors,
            )
        )

    def _follow(self, work: SchedulerOutput) -> None:
        for request_id in work.finished_request_ids:
            del self.requests[request_id]
        for new in work.new_requests:
            assert new.request_id not in self.requests
            tables = [list(table) for table in new.block_ids]
            self.requests[new.request_id] = _State(
                list(new.token_ids), tables, new.num_computed_tokens
            )
        for cached in work.cached_requests:
            state = self.requests[cached.request_id]
            assert state.computed == cached.num_computed_tokens
            for table, blocks in zip(state.tables, cached.new_block_ids, strict=True):
                table += blocks

    def _compute(self, state: _State, count: int, drafts: list[int]) -> list[int]:
        start, end = state.computed, state.computed + count
        tokens = (state.token_ids + drafts)[start:end]
        assert len(tokens) == count, "scheduled beyond the tokens that exist"
        nexts = []
        for position, token in enumerate(tokens, start=start):
            rows = [
                tuple(
                    self._read(g, state.tables[g], p) for p in self._window(g, position)
                )
                for g in range(len(self.stores))
            ]
            value = _mix(token, rows)
            for g in range(len(self.stores)):
                self._write(g, state.tables[g], position, value)
            nexts.append(value % VOCAB)
        if end < len(state.token_ids):
            state.computed = end
            return []
        accepted = 0
        while (
            accepted < len(drafts)
            and drafts[accepted] == nexts[accepted - len(drafts) - 1]
        ):
            accepted += 1
        sampled = nexts[len(nexts) - 1 - len(drafts) :][: accepted + 1]
        state.token_ids += sampled
        state.computed = len(state.token_ids) - 1
        return sampled

    def _window(self, g: int, position: int) -> range:
        window = self.config.groups[g].window
        return range(0 if window is None else max(0, position - window + 1), position)

    def _read(self, g: int, table: list[int], position: int) -> int:
        block = table[position // self.config.block_size]
        assert block != 0, f"group {g}: position {position} is behind what is held"
        rows = self.stores[g][block]
        return rows[position % self.config.block_size % len(rows)]

    def _write(self, g: int, table: list[int], position: int, value: int) -> None:
        block = table[position // self.config.block_size]
        assert block != 0
        rows = self.stores[g][block]
        rows[position % self.config.block_size % len(rows)] = value

    def _draft(self, state: _State) -> list[int]:
        """Guess the next tokens, right with `draft_accuracy`; dirties the rows ahead."""
        states: list[int] = []
        for token in state.token_ids:
            states.append(_next_state(token, states, self.config.groups))
        drafts = []
        for ahead in range(self.num_drafts):
            token = states[-1] % VOCAB
            if self.rng.random() > self.draft_accuracy:
                token = (token + 1) % VOCAB
            drafts.append(token)
            states.append(_next_state(token, states, self.config.groups))
            position = state.computed + ahead
            if position // self.config.block_size < len(state.tables[0]):
                for g in range(len(self.stores)):
                    self._write(g, state.tables[g], position, -2)
        return drafts
