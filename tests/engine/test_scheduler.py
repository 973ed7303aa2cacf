# SPDX-License-Identifier: Apache-2.0
"""The scheduler and the block pool against the paged oracle."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.paged_oracle import (
    FULL,
    SLIDING,
    CountingGrammar,
    PagedOracleExecutor,
    conv,
    expected_tokens,
    make_request,
)
from vllm.config.kv_cache import KVCacheConfig
from vllm.engine.core import EngineCore
from vllm.engine.messages import EngineCoreOutput, FinishReason
from vllm.engine.scheduler import Scheduler, SchedulerLimits
from vllm.sampling_params import StructuredOutputsParams

BLOCK = 8


def make_core(
    *,
    groups=(FULL,),
    num_blocks=64,
    max_num_seqs=8,
    budget=32,
    max_model_len=64,
    policy="fcfs",
    caching=True,
    async_scheduling=False,
    drafts=0,
    threshold=0,
    chunked=True,
) -> EngineCore:
    config = KVCacheConfig(BLOCK, groups, (num_blocks,) * len(groups))
    limits = SchedulerLimits(
        max_num_seqs,
        budget,
        max_model_len,
        policy,
        threshold,
        chunked,
        num_speculative_tokens=drafts,
    )
    executor = PagedOracleExecutor(config, drafts)
    return EngineCore(
        Scheduler(limits, config, caching),
        executor,
        async_scheduling=async_scheduling,
        compile_grammar=lambda constraint: CountingGrammar(int(constraint.regex)),
    )


def check_blocks(core: EngineCore) -> None:
    """Each block is held by exactly the requests whose tables name it, or is free."""
    kv = core.scheduler.kv
    for index, pool in enumerate(kv.pools):
        counts = [0] * pool.num_blocks
        for request in core.scheduler.running:
            for block in request.block_tables[index]:
                counts[block] += block != 0
            behind = request.block_tables[index][: request.first_held_block[index]]
            assert not any(behind), "held behind the window"
            if request.capacity > request.num_computed_tokens:  # something is yet to be computed
                first = kv.groups[index].first_needed_block(request.num_computed_tokens, BLOCK)
                assert 0 not in request.block_tables[index][first:]
        assert counts == pool.ref_counts, f"group {index}"
        free = set(pool._free)
        assert free == {b for b in range(1, pool.num_blocks) if counts[b] == 0}
        for block_hash, block in pool._published.items():
            assert pool._hash_of[block] == block_hash


def check_idle(core: EngineCore) -> None:
    assert core.scheduler.num_unfinished == 0
    assert not core.scheduler.running and len(core.scheduler.waiting) == 0
    check_blocks(core)
    for pool in core.scheduler.kv.pools:
        assert pool.num_free == pool.num_blocks - 1


def run(core: EngineCore, max_steps: int = 5000) -> dict[str, list[EngineCoreOutput]]:
    """Step until nothing is left, checking the blocks at each step."""
    outputs: dict[str, list[EngineCoreOutput]] = {}
    steps = 0
    while core.has_work:
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
        check_blocks(core)
        steps += 1
        assert steps < max_steps, "the requests do not end"
    check_idle(core)
    return outputs


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return [t for output in outputs for t in output.new_token_ids]


GROUPS = {
    "full": (FULL,),
    "sliding": (SLIDING,),
    "full+sliding": (FULL, SLIDING),
    "full+sliding+conv": (FULL, SLIDING, conv(4, BLOCK, 3)),
}


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    groups=st.sampled_from(sorted(GROUPS)),
    num_blocks=st.sampled_from([10, 14, 24, 80]),
    budget=st.sampled_from([5, 16, 64]),
    max_num_seqs=st.sampled_from([1, 3, 8]),
    policy=st.sampled_from(["fcfs", "priority"]),
    mode=st.sampled_from(["sync", "async", "draft"]),
    caching=st.booleans(),
    threshold=st.sampled_from([0, 7]),
)
def test_every_request_ends_with_the_tokens_of_an_undisturbed_run(
    seed, groups, num_blocks, budget, max_num_seqs, policy, mode, caching, threshold
):
    rng = random.Random(seed)
    drafts = 3 if mode == "draft" else 0
    core = make_core(
        groups=GROUPS[groups],
        num_blocks=num_blocks,
        budget=budget,
        max_num_seqs=max_num_seqs,
        policy=policy,
        caching=caching,
        async_scheduling=mode == "async",
        drafts=drafts,
        threshold=threshold,
    )
    limit = min(64, core.scheduler.max_sequence_tokens)
    # Prompts are put together from few blocks, so that equal content meets other beginnings.
    blocks = [[rng.randrange(1, 60) for _ in range(BLOCK)] for _ in range(2)]
    live, want, got, reasons, aborted = [], {}, {}, {}, set()
    prompt_logprobs, prompts = {}, {}
    num_requests, arrived, steps = rng.randrange(2, 12), 0, 0
    while arrived < num_requests or core.has_work:
        while arrived < num_requests and rng.random() < 0.4:
            prompt = [t for _ in range(rng.randrange(5)) for t in rng.choice(blocks)]
            if not prompt or rng.random() < 0.6:
                prompt += [rng.randrange(1, 60) for _ in range(rng.randrange(1, 12))]
            request = make_request(
                f"r{arrived}",
                prompt,
                priority=rng.randrange(3),
                salt=rng.choice([None, "a"]),
                max_tokens=rng.choice([1, 2, 9, 30, None]),
                ignore_eos=rng.random() < 0.3,
                stop_token_ids=[rng.randrange(60)] if rng.random() < 0.2 else None,
                min_tokens=1 if rng.random() < 0.2 else 0,
                prompt_logprobs=1 if rng.random() < 0.1 else None,
            )
            grammar_length = rng.choice([None, None, 12])
            if grammar_length is not None:
                request.sampling_params.structured_outputs = StructuredOutputsParams(regex="12")
            want[request.request_id] = expected_tokens(
                prompt, request.sampling_params, GROUPS[groups], limit, grammar_length
            )
            core.executor.answers[request.request_id] = want[request.request_id]
            if request.sampling_params.prompt_logprobs is not None:
                prompt_logprobs[request.request_id] = []
                prompts[request.request_id] = prompt
            core.add_request(request)
            live.append(request.request_id)
            arrived += 1
        if live and rng.random() < 0.03:
            victim = rng.choice(live)
            core.abort_requests([victim, "unknown"])
            aborted.add(victim)
            live.remove(victim)
        if rng.random() < 0.02:
            core.reset_prefix_cache()
        for output in core.step().outputs:
            assert output.request_id not in aborted
            assert output.request_id not in reasons, "an output after the last"
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
            for entry in output.prompt_logprobs or ():
                prompt_logprobs[output.request_id] += entry.token_ids
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
                live.remove(output.request_id)
        check_blocks(core)
        steps += 1
        assert steps < 5000, "the requests do not end"
    check_idle(core)
    for request_id, tokens in want.items():
        if request_id not in aborted:
            assert got[request_id] == tokens, request_id
            assert reasons[request_id] in (FinishReason.STOP, FinishReason.LENGTH)
            if request_id in prompts:
                assert prompt_logprobs[request_id] == prompts[request_id][1:]
