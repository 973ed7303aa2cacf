# SPDX-License-Identifier: Apache-2.0
"""What each step computes: the scheduler.

There are no phases. A request has tokens that are known and tokens that are computed;
a step computes some of the difference, within the token budget. Requests that generate
come first (one token each, or 1 + k with k drafts to verify), then prompts in chunks, then
new requests in the order of the queue, as long as blocks and seats last. If a running
request gets no block, the newest one loses its blocks and recomputes later; the oldest
always advances, so every request ends.

`schedule` assumes that the step succeeds: it advances `num_computed_tokens` at once, so that
the next step can be scheduled before the result is there. The next token of such a request
is unknown here (`num_in_flight`), the worker feeds it itself. `update_from_output` takes the
results in order: it corrects for rejected drafts, ends requests, and publishes blocks. A
request that turns out to have ended while another step computes it loses that one token.
Speculative requests are scheduled only with all their tokens known, and so are requests with
a grammar, whose mask depends on the last token.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable

from vllm.config.kv_cache import KVCacheConfig
from vllm.engine.kv_cache import KVCacheManager
from vllm.engine.messages import (
    CachedRequestData,
    EngineCoreOutput,
    FinishReason,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from vllm.engine.request import Request, RequestStatus
from vllm.engine.request_queue import make_queue, priority_key

_RUNNING = RequestStatus.RUNNING
_FINISHED = RequestStatus.FINISHED
_NO_TOKENS: list[int] = []  # shared, never written to


@dataclasses.dataclass
class SchedulerLimits:
    """How much one step may hold; the fields are named as in SchedulerConfig."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one request in a step; 0: as many as the budget has."""
    enable_chunked_prefill: bool = True
    num_speculative_tokens: int = 0


@dataclasses.dataclass
class ScheduledStep:
    """One step on its way: what the workers were told, and the requests in that order."""

    output: SchedulerOutput
    requests: list[Request]
    starts: dict[str, int]
    """Tokens computed before the step, of the requests that want prompt log-probabilities."""


class _Step:
    """A step while it is put together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.tokens: dict[Request, int] = {}
        self.new_blocks: dict[Request, list[list[int]]] = {}
        self.drafts: dict[Request, list[int]] = {}
        self.admitted: set[Request] = set()
        self.preempted = False

    def remove(self, request: Request) -> None:
        """Take back what was scheduled for a request that is preempted."""
        num_tokens = self.tokens.pop(request, 0)
        self.budget += num_tokens
        self.new_blocks.pop(request, None)
        self.drafts.pop(request, None)


class Scheduler:
    """The requests of the core, the order in which they advance, and their blocks."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv_config: KVCacheConfig,
        enable_prefix_caching: bool,
    ) -> None:
        self.limits = limits
        # Drafting writes the cache up to this many tokens past the ones that are scheduled.
        self._lookahead = limits.num_speculative_tokens
        self.kv = KVCacheManager(kv_config, enable_prefix_caching, self._lookahead)
        self.waiting = make_queue(limits.policy)
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.stats = SchedulerStats()
        self._chunk = min(limits.max_num_batched_tokens, self.kv.max_chunk)
        if limits.long_prefill_token_threshold > 0:
            self._chunk = min(self._chunk, limits.long_prefill_token_threshold)
        self.max_sequence_tokens = limits.max_model_len
        if self.kv.max_sequence_tokens < limits.max_model_len:
            self.max_sequence_tokens = self.kv.max_sequence_tokens - self._lookahead
        self._max_spare = min(kv_config.num_blocks) // 50
        self._forgotten: list[str] = []  # ids that the workers must drop
        self._num_steps = 0
        self._num_added = 0

    # -- requests come and go ---------------------------------------------------------

    def refusal(self, request: Request) -> str | None:
        """Why the request can never run, or None."""
        prompt, limit = request.num_prompt_tokens, self.limits.max_model_len
        if prompt == 0:
            return "the prompt is empty"
        if prompt >= limit:
            return f"the prompt has {prompt} tokens; a context of {limit} leaves no room to answer"
        if prompt >= self.max_sequence_tokens:
            return (
                f"the prompt has {prompt} tokens; the KV cache holds sequences of at most "
                f"{self.max_sequence_tokens}"
            )
        if not self.limits.enable_chunked_prefill and prompt > self._chunk:
            return f"the prompt has {prompt} tokens; a step takes {self._chunk} without chunking"
        return None

    def add_request(self, request: Request) -> None:
        """Queue a request that `refusal` has nothing against."""
        request.order = self._num_added
        self._num_added += 1
        request.max_total_tokens = min(request.max_total_tokens, self.max_sequence_tokens)
        self.requests[request.request_id] = request
        self.waiting.put(request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[Request]:
        """End requests that nobody waits for; unknown ids are ignored. Returns the ended."""
        aborted = [r for i in request_ids if (r := self.requests.get(i)) is not None]
        for request in aborted:
            self._finish(request)
        if aborted:
            self.running = [r for r in self.running if r.status is _RUNNING]
        return aborted

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self.requests)

    def reset_prefix_cache(self) -> None:
        """Forget all published blocks."""
        self.kv.reset_prefix_cache(self.running)

    def _finish(self, request: Request) -> None:
        """Free everything; the caller drops it from `running`."""
        if request.status is _RUNNING:
            self._forgotten.append(request.request_id)
        else:
            self.waiting.discard(request)
        self.kv.free(request)
        request.status = _FINISHED
        del self.requests[request.request_id]

    def _preempt(self, request: Request, step: _Step) -> None:
        step.remove(request)
        step.preempted = True
        self.running.remove(request)
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_confirmed_tokens = request.num_in_flight = 0
        request.draft_token_ids = []
        self._forgotten.append(request.request_id)
        self.waiting.put_back(request)
        self.stats.num_preemptions += 1

    def _grow_or_preempt(self, request: Request, num_tokens: int, step: _Step) -> bool:
        """Make room for `num_tokens`, taking blocks from newer requests; False: it must wait."""
        while (blocks := self.kv.grow(request, num_tokens)) is None:
            if self.limits.policy == "priority":
                victim = max(self.running, key=priority_key)
            else:
                victim = self.running[-1]
            self._preempt(victim, step)
            if victim is request:
                return False
        if blocks is not self.kv.no_blocks:
            step.new_blocks[request] = blocks
        return True

    # -- one step ---------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """Choose the work of the next step; None if nothing can be computed now."""
        step = _Step(self.limits.max_num_batched_tokens)
        self._schedule_prompts(self._schedule_decodes(step), step)
        if not step.preempted:
            self._schedule_waiting(step)
        if not step.tokens:
            return None
        return self._launch(step)

    def _schedule_decodes(self, step: _Step) -> list[Request]:
        """One token (and its drafts) for each generating request; returns the others."""
        prompts = []
        tokens = step.tokens
        lookahead = self._lookahead
        for request in tuple(self.running):
            if request.status is not _RUNNING:
                continue  # preempted a moment ago
            known = len(request.token_ids) + request.num_in_flight
            start = request.num_computed_tokens
            if known - start != 1:
                prompts.append(request)
                continue
            if step.budget < 1:
                break
            if request.num_in_flight and (
                known >= request.max_total_tokens or request.grammar is not None
            ):
                continue  # its last token is on its way, or its mask needs that token
            num_tokens = 1
            if request.draft_token_ids:
                num_tokens += self._choose_drafts(request, step)
            end = start + num_tokens
            if lookahead:
                end = self._with_lookahead(end)
            if end > request.capacity and not self._grow_or_preempt(request, end, step):
                continue
            tokens[request] = num_tokens
            step.budget -= num_tokens
        return prompts

    def _choose_drafts(self, request: Request, step: _Step) -> int:
        """Keep the drafts that can still count; returns how many are verified."""
        room = request.max_total_tokens - len(request.token_ids) - 1
        drafts = request.draft_token_ids[: max(0, min(room, step.budget - 1))]
        request.draft_token_ids = []
        if request.grammar is not None:
            drafts = drafts[: request.grammar.num_allowed(drafts)]
        if drafts:
            step.drafts[request] = drafts
        return len(drafts)

    def _schedule_prompts(self, prompts: list[Request], step: _Step) -> None:
        """The next chunk of each running request that is still computing its known tokens."""
        for request in prompts:
            if request.status is not _RUNNING:
                continue
            start = request.num_computed_tokens
            num_tokens = min(len(request.token_ids) - start, self._chunk, step.budget)
            if num_tokens < 1:
                continue
            end = self._with_lookahead(start + num_tokens)
            if self._grow_or_preempt(request, end, step):
                step.tokens[request] = num_tokens
                step.budget -= num_tokens

    def _schedule_waiting(self, step: _Step) -> None:
        """Admit requests from the head of the queue; the first that does not fit stops it."""
        postponed: list[Request] = []
        under_way: set[bytes] | None = None
        while step.budget > 0 and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting.peek()
            if request is None or len(postponed) >= self.limits.max_num_seqs:
                break
            num_cached, prefix = self.kv.find_prefix(request)
            if under_way is None:
                under_way = self._blocks_under_way()
            if self._soon_cached(request, num_cached, under_way):
                postponed.append(self.waiting.take())
                continue
            if not self._admit(request, num_cached, prefix, step):
                break
            under_way.update(request.block_hashes)
        for request in reversed(postponed):
            self.waiting.put_back(request)

    def _blocks_under_way(self) -> set[bytes]:
        """Hashes of the blocks that running requests compute and have not published yet."""
        return {
            block_hash
            for request in self.running
            if request.num_confirmed_tokens < request.num_prompt_tokens
            for block_hash in request.block_hashes[request.num_published_blocks :]
        }

    def _soon_cached(self, request: Request, num_cached: int, under_way: set[bytes]) -> bool:
        """Whether a running request computes most of what this one lacks.

        Many samples of one prompt arrive together: the first computes it, the others wait
        for its blocks and start a step or two later with the prompt in the cache.
        """
        if not under_way or request.needs_whole_prompt:
            return False
        size = self.kv.block_size
        gain = 0
        for block_hash in request.block_hashes[num_cached // size :]:
            if block_hash not in under_way:
                break
            gain += size
        return 2 * gain > len(request.token_ids) - num_cached

    def _admit(
        self, request: Request, num_cached: int, prefix: list[list[int]], step: _Step
    ) -> bool:
        known = len(request.token_ids)
        num_tokens = min(known - num_cached, self._chunk)
        whole = not self.limits.enable_chunked_prefill
        if whole and num_tokens > step.budget and step.tokens:
            return False
        num_tokens = min(num_tokens, step.budget)
        end = self._with_lookahead(num_cached + num_tokens)
        # A few blocks stay free for the running ones, lest the newcomer be thrown out at once.
        spare = min(len(self.running), self._max_spare) if self.running else -1
        if not self.kv.can_admit(known, end, self._chunk + self._lookahead, prefix, spare):
            return False
        self.waiting.take()
        self.kv.start(request, num_cached, prefix)
        self.kv.grow(request, end)
        if request.status is RequestStatus.WAITING:
            self.stats.prefix_cache_queries += known
            self.stats.prefix_cache_hits += num_cached
            request.num_cached_tokens = num_cached
            request.scheduled_time = time.monotonic()
        request.status = _RUNNING
        request.num_computed_tokens = request.num_confirmed_tokens = num_cached
        self.running.append(request)
        step.admitted.add(request)
        step.tokens[request] = num_tokens
        step.budget -= num_tokens
        return True

    def _with_lookahead(self, num_tokens: int) -> int:
        """Tokens to have blocks for, so that the drafter can write ahead."""
        return min(num_tokens + self._lookahead, self.limits.max_model_len)

    def _launch(self, step: _Step) -> ScheduledStep:
        """Write down the step for the workers and advance its requests."""
        batch = step.tokens
        if any(n != 1 for n in batch.values()):
            batch = dict(sorted(batch.items(), key=lambda item: item[1] != 1))
        new_requests: list[NewRequestData] = []
        cached_requests: list[CachedRequestData] = []
        scheduled: dict[str, int] = {}
        starts: dict[str, int] = {}
        masked: list[Request] = []
        blocks_of, no_blocks, admitted = (
            step.new_blocks,
            self.kv.no_blocks,
            step.admitted,
        )
        for request, num_tokens in batch.items():
            start = request.num_computed_tokens
            if admitted and request in admitted:
                new_requests.append(_new_request_data(request))
            else:
                blocks = blocks_of.get(request, no_blocks)
                cached_requests.append(CachedRequestData(request.request_id, blocks, start))
            scheduled[request.request_id] = num_tokens
            if request.wants_prompt_logprobs:
                starts[request.request_id] = start
            request.num_computed_tokens = start = start + num_tokens
            if start >= len(request.token_ids) + request.num_in_flight:
                request.num_in_flight += 1
                if request.grammar is not None:
                    masked.append(request)
        drafts = {r.request_id: d for r, d in step.drafts.items()}
        bitmask, mask_ids = _grammar_rows(masked, step.drafts)
        self._num_steps += 1
        output = SchedulerOutput(
            step=self._num_steps,
            new_requests=new_requests,
            cached_requests=cached_requests,
            num_scheduled_tokens=scheduled,
            draft_token_ids=drafts,
            finished_request_ids=self._forgotten,
            total_num_scheduled_tokens=self.limits.max_num_batched_tokens - step.budget,
            grammar_bitmask=bitmask,
            grammar_request_ids=mask_ids,
        )
        self._forgotten = []
        return ScheduledStep(output, list(batch), starts)

    # -- results ----------------------------------------------------------------------

    def update_from_output(
        self, step: ScheduledStep, result: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Take the results of a step; returns what its requests are to be told."""
        outputs: list[EngineCoreOutput] = []
        errors, drafts = result.errors, step.output.draft_token_ids
        num_unfinished = len(self.requests)
        counts = step.output.num_scheduled_tokens.values()
        for request, num_tokens, sampled in zip(
            step.requests, counts, result.sampled_token_ids, strict=True
        ):
            if request.status is _FINISHED:
                continue  # aborted, or ended a step ago
            if errors and request.request_id in errors:
                outputs.append(self._fail(request, errors[request.request_id]))
                continue
            if request.status is _RUNNING:
                if drafts and sampled and request.request_id in drafts:
                    num_tokens -= self._reject_drafts(request, drafts, sampled)
                request.num_confirmed_tokens += num_tokens
                request.draft_token_ids = result.draft_token_ids.get(request.request_id, _NO_TOKENS)
            if sampled:
                outputs.append(self._take_tokens(request, sampled))
            elif request.status is _RUNNING:
                self.kv.publish(request)
        if result.prompt_logprobs or result.logprobs:
            self._attach_logprobs(step, result, outputs)
        if len(self.requests) != num_unfinished:
            self.running = [r for r in self.running if r.status is _RUNNING]
        return outputs

    def _take_tokens(self, request: Request, sampled: list[int]) -> EngineCoreOutput:
        """Append sampled tokens; ends the request if one of them does."""
        tokens, reason, stop_token = request.append(sampled)
        if request.status is _RUNNING:
            request.num_in_flight -= 1
            if request.num_confirmed_tokens >= request.next_publish_at:
                self.kv.publish(request)
        output = EngineCoreOutput(request.request_id, tokens, reason, stop_token)
        if not request.reported:
            self._report_start(request, output)
        if reason is not None:
            if reason is FinishReason.ERROR:
                output.stop_reason = "grammar"
                assert request.grammar is not None
                output.error = request.grammar.error
            self._finish(request)
        return output

    def _report_start(self, request: Request, output: EngineCoreOutput) -> None:
        request.reported = True
        output.num_cached_tokens = request.num_cached_tokens
        output.scheduled_time = request.scheduled_time

    def _attach_logprobs(
        self,
        step: ScheduledStep,
        result: ModelRunnerOutput,
        outputs: list[EngineCoreOutput],
    ) -> None:
        """Add log-probabilities to the outputs; prompt pieces come without tokens too."""
        by_id = {output.request_id: output for output in outputs}
        for request_id, entries in result.logprobs.items():
            output = by_id.get(request_id)
            if output is not None:
                output.logprobs = entries[: len(output.new_token_ids)]
        for request in step.requests:
            pieces = result.prompt_logprobs.get(request.request_id)
            output = by_id.get(request.request_id)
            ended = request.status is _FINISHED
            if not pieces or (ended and output is None) or request.request_id in result.errors:
                continue
            fresh = self._fresh_prompt_logprobs(step, request, pieces)
            if output is None and fresh:
                output = EngineCoreOutput(request.request_id, [])
                if not request.reported:
                    self._report_start(request, output)
                outputs.append(output)
            if output is not None and fresh:
                output.prompt_logprobs = fresh

    def _fresh_prompt_logprobs(
        self, step: ScheduledStep, request: Request, pieces: list[TokenLogprobs]
    ) -> list[TokenLogprobs]:
        """The entries that were not sent before a preemption made the prompt run again.

        Entry i is about prompt position i + 1 and comes from computing token i.
        """
        start = step.starts[request.request_id]
        assert start <= request.num_prompt_logprobs_sent
        end = min(start + len(pieces), request.num_prompt_tokens - 1)
        fresh = pieces[request.num_prompt_logprobs_sent - start : max(0, end - start)]
        request.num_prompt_logprobs_sent += len(fresh)
        return fresh

    def _fail(self, request: Request, reason: str) -> EngineCoreOutput:
        self._finish(request)
        return EngineCoreOutput(
            request.request_id,
            [],
            FinishReason.ERROR,
            stop_reason="internal-error",
            error=reason,
        )

    def _reject_drafts(
        self, request: Request, drafts: dict[str, list[int]], sampled: list[int]
    ) -> int:
        """Roll back the drafts that the model did not confirm; returns how many."""
        num_drafts = len(drafts[request.request_id])
        rejected = num_drafts + 1 - len(sampled)
        request.num_computed_tokens -= rejected
        stats = self.stats
        stats.num_drafts += 1
        stats.num_draft_tokens += num_drafts
        stats.num_accepted_tokens += len(sampled) - 1
        per_position = stats.accepted_per_position
        per_position.extend([0] * (self.limits.num_speculative_tokens - len(per_position)))
        for position in range(len(sampled) - 1):
            per_position[position] += 1
        return rejected

    def take_stats(self) -> SchedulerStats:
        """Gauges now, and counters since the last call."""
        stats = self.stats
        stats.num_running = len(self.running)
        stats.num_waiting = len(self.waiting)
        stats.kv_cache_usage = self.kv.usage
        self.stats = SchedulerStats()
        return stats


def _new_request_data(request: Request) -> NewRequestData:
    # Copies: the scheduler goes on writing to its lists while an in-process worker reads.
    return NewRequestData(
        request_id=request.request_id,
        token_ids=list(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=request.sampling_params,
        block_ids=[list(table) for table in request.block_tables],
        num_computed_tokens=request.num_computed_tokens,
    )


def _grammar_rows(
    requests: list[Request], drafts: dict[Request, list[int]]
) -> tuple[bytes | None, list[str]]:
    """Masks for the positions that these requests sample, and whose each row is."""
    if not requests:
        return None, []
    rows, ids = [], []
    for request in requests:
        assert request.grammar is not None
        drafted = drafts.get(request, _NO_TOKENS)
        rows.append(request.grammar.bitmask_rows(drafted))
        ids += [request.request_id] * (1 + len(drafted))
    return b"".join(rows), ids
