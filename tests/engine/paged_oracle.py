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
from vllm.engine.messages import (
    EngineCoreRequest,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    TokenLogprobs,
)
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
    return KVCacheGroup("conv", _LAYER, window=taps, rows_per_block=min(rows, block_size))


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


def pick(state: int, allowed: list[int] | None) -> int:
    """The next token: the state modulo what is allowed."""
    return state % VOCAB if allowed is None else allowed[state % len(allowed)]


class CountingGrammar:
    """The n-th token must be n modulo 3 (a multiple of 3 plus n), and `length` tokens end it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.count = 0
        self.error = "not the token's turn"

    @staticmethod
    def allowed(count: int) -> list[int]:
        """Tokens that may be the one after `count` others; never EOS."""
        return [t for t in range(1, VOCAB) if t % 3 == count % 3]

    def accept(self, token_ids: list[int]) -> bool:
        """Count tokens that have their turn."""
        for token in token_ids:
            if token not in self.allowed(self.count):
                return False
            self.count += 1
        return True

    def num_allowed(self, token_ids: list[int]) -> int:
        """Drafts that have their turn."""
        for index, token in enumerate(token_ids):
            if token not in self.allowed(self.count + index) or self.count + index >= self.length:
                return index
        return len(token_ids)

    def bitmask_rows(self, draft_token_ids: list[int]) -> bytes:
        """One row for each position."""
        assert self.num_allowed(draft_token_ids) == len(draft_token_ids)
        counts = range(self.count, self.count + 1 + len(draft_token_ids))
        rows = [sum(1 << t for t in self.allowed(c)) for c in counts]
        return b"".join(row.to_bytes(8, "little") for row in rows)

    @property
    def terminated(self) -> bool:
        """Whether all tokens are there."""
        return self.count >= self.length


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
    grammar_length: int | None = None,
) -> list[int]:
    """What a request must answer; `limit` is the longest sequence."""
    states: list[int] = []
    for token in prompt:
        states.append(_next_state(token, states, groups))
    output: list[int] = []
    most = limit - len(prompt)
    most = most if params.max_tokens is None else min(most, params.max_tokens)
    while len(output) < most:
        allowed = None if grammar_length is None else CountingGrammar.allowed(len(output))
        token = pick(states[-1], allowed)
        output.append(token)
        if grammar_length is not None and len(output) >= grammar_length:
            break
        stops = (() if params.ignore_eos else (EOS,)) + tuple(params.stop_token_ids or ())
        if token in stops and len(output) >= params.min_tokens:
            break
        states.append(_next_state(token, states, groups))
    return output


class _State:
    """What the worker knows of a request."""

    def __init__(self, new: NewRequestData) -> None:
        self.token_ids = list(new.token_ids)
        self.tables = [list(table) for table in new.block_ids]
        self.computed = new.num_computed_tokens
        self.num_prompt_tokens = new.num_prompt_tokens
        self.params = new.sampling_params


class _Done:
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        return self._output


class PagedOracleExecutor:
    """Executes steps at once, in the order of their launch, as a device queue would."""

    def __init__(
        self,
        config: KVCacheConfig,
        num_drafts: int = 0,
        draft_accuracy: float = 0.6,
        max_model_len: int = 64,
    ) -> None:
        self.max_model_len = max_model_len
        self.config = config
        self.num_drafts = num_drafts
        self.draft_accuracy = draft_accuracy
        self.rng = random.Random(7)
        self.failing: dict[str, str] = {}
        self.answers: dict[str, list[int]] = {}
        """What the drafter knows of each request's answer."""
        self.requests: dict[str, _State] = {}
        self.batches: list[dict[str, int]] = []
        self.stores = [
            [[-1] * (group.rows_per_block or config.block_size) for _ in range(count)]
            for group, count in zip(config.groups, config.num_blocks, strict=True)
        ]

    def check_health(self) -> None:
        """Nothing can be gone."""

    def shutdown(self) -> None:
        """Nothing to release."""

    def execute_model(self, work: SchedulerOutput) -> _Done:
        """Compute a step and check that its description is consistent."""
        self._follow(work)
        counts = list(work.num_scheduled_tokens.values())
        assert sum(counts) == work.total_num_scheduled_tokens
        assert counts == sorted(counts, key=lambda n: n != 1), "single tokens come first"
        self.batches.append(dict(work.num_scheduled_tokens))
        sampled, drafts, errors, prompt_logprobs = [], {}, {}, {}
        masks = _masks(work)
        for request_id, count in work.num_scheduled_tokens.items():
            state = self.requests[request_id]
            proposed = work.draft_token_ids.get(request_id, [])
            if state.params.prompt_logprobs is not None:
                prompt_logprobs[request_id] = _prompt_logprobs(state, count)
            tokens = self._compute(state, count, proposed, masks.get(request_id))
            sampled.append(tokens)
            if request_id in self.failing:
                errors[request_id] = self.failing[request_id]
            elif tokens and self.num_drafts:
                drafts[request_id] = self._draft(request_id, state)
        ids = list(work.num_scheduled_tokens)
        return _Done(
            ModelRunnerOutput(
                ids,
                sampled,
                prompt_logprobs=prompt_logprobs,
                draft_token_ids=drafts,
                errors=errors,
            )
        )

    def _follow(self, work: SchedulerOutput) -> None:
        for request_id in work.finished_request_ids:
            del self.requests[request_id]
        for new in work.new_requests:
            assert new.request_id not in self.requests
            self.requests[new.request_id] = _State(new)
        for cached in work.cached_requests:
            state = self.requests[cached.request_id]
            assert state.computed == cached.num_computed_tokens
            for table, blocks in zip(state.tables, cached.new_block_ids, strict=True):
                table += blocks
        for state in self.requests.values():
            for table in state.tables:  # a runner has room for no more
                assert len(table) <= -(-self.max_model_len // self.config.block_size)

    def _compute(
        self,
        state: _State,
        count: int,
        drafts: list[int],
        masks: list[list[int]] | None,
    ) -> list[int]:
        start, end = state.computed, state.computed + count
        tokens = (state.token_ids + drafts)[start:end]
        assert len(tokens) == count, "scheduled beyond the tokens that exist"
        nexts: list[int] = []
        num_sampled = 1 + len(drafts)
        for position, token in enumerate(tokens, start=start):
            rows = [
                tuple(self._read(g, state.tables[g], p) for p in self._window(g, position))
                for g in range(len(self.stores))
            ]
            value = _mix(token, rows)
            for g in range(len(self.stores)):
                self._write(g, state.tables[g], position, value)
            row = position - (end - num_sampled)
            nexts.append(pick(value, masks[row] if masks and row >= 0 else None))
        if end < len(state.token_ids):
            state.computed = end
            return []
        candidates = nexts[-num_sampled:]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == candidates[accepted]:
            accepted += 1
        sampled = candidates[: accepted + 1]
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

    def _draft(self, request_id: str, state: _State) -> list[int]:
        """Guess the next tokens, right with `draft_accuracy`; dirties the rows ahead of them."""
        written = len(state.token_ids) - state.num_prompt_tokens
        drafts = []
        for ahead in range(self.num_drafts):
            answer = self.answers[request_id]
            token = answer[written + ahead] if written + ahead < len(answer) else 1
            if self.rng.random() > self.draft_accuracy:
                token = (token + 1) % VOCAB
            drafts.append(token)
            position = state.computed + ahead
            if position < self.max_model_len:
                for g in range(len(self.stores)):
                    self._write(g, state.tables[g], position, -2)
        return drafts


def _masks(work: SchedulerOutput) -> dict[str, list[list[int]]]:
    """Allowed tokens of each row, by request."""
    masks: dict[str, list[list[int]]] = {}
    for index, request_id in enumerate(work.grammar_request_ids):
        assert work.grammar_bitmask is not None
        row = int.from_bytes(work.grammar_bitmask[8 * index : 8 * index + 8], "little")
        masks.setdefault(request_id, []).append([t for t in range(VOCAB) if row >> t & 1])
    for request_id, rows in masks.items():
        assert len(rows) == 1 + len(work.draft_token_ids.get(request_id, []))
    return masks


def _prompt_logprobs(state: _State, count: int) -> list[TokenLogprobs]:
    """An entry for each prompt position that follows a computed one; it names the token."""
    end = min(state.computed + count, state.num_prompt_tokens - 1)
    return [
        TokenLogprobs([state.token_ids[position + 1]], [0.0], [1])
        for position in range(state.computed, end)
    ]
