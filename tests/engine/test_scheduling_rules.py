# SPDX-License-Identifier: Apache-2.0
"""Order, fairness, admission, caching and bookkeeping, each rule on its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.engine.paged_oracle import (
    EOS,
    FULL,
    SLIDING,
    CountingGrammar,
    expected_tokens,
    make_request,
)
from tests.engine.test_scheduler import BLOCK, make_core, run, tokens_of
from vllm.engine.messages import FinishReason
from vllm.errors import RequestError
from vllm.sampling_params import StructuredOutputsParams


def numbered(request_id: str, length: int, start: int = 1, **params):
    params.setdefault("ignore_eos", True)
    prompt = [(start + i) % 59 + 1 for i in range(length)]
    return make_request(request_id, prompt, **params)


def batches(core) -> list[dict[str, int]]:
    return core.executor.batches


def test_generating_requests_come_before_the_chunks_of_a_long_prompt():
    core = make_core(budget=16)
    core.add_request(numbered("short", 4, max_tokens=8))
    core.step()
    core.add_request(numbered("long", 40, max_tokens=1))
    run(core)
    assert [list(b.items()) for b in batches(core)[1:4]] == [
        [("short", 1), ("long", 15)],
        [("short", 1), ("long", 15)],
        [("short", 1), ("long", 10)],
    ]


def test_the_threshold_leaves_room_for_other_prompts_in_the_step():
    core = make_core(budget=24, threshold=10)
    core.add_request(numbered("long", 25, max_tokens=1))
    core.add_request(numbered("b", 7, start=30, max_tokens=1))
    core.add_request(numbered("c", 12, start=40, max_tokens=1))
    run(core)
    assert batches(core)[0] == {"long": 10, "b": 7, "c": 7}


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it_whole():
    core = make_core(budget=24, chunked=False)
    core.add_request(numbered("a", 20, max_tokens=1))
    core.add_request(numbered("b", 20, start=30, max_tokens=1))
    core.add_request(numbered("c", 25, start=5, max_tokens=1))
    outputs = run(core)
    assert batches(core) == [{"a": 20}, {"b": 20}]
    assert "without chunking" in outputs["c"][-1].error


def test_the_newest_request_is_preempted_and_the_oldest_never():
    core = make_core(num_blocks=13, caching=False)
    for index in range(3):
        core.add_request(numbered(f"r{index}", 20, start=index * 7, max_tokens=30))
    outputs = run(core)
    first = [next(i for i, b in enumerate(batches(core)) if f"r{k}" in b) for k in range(3)]
    assert first == [0, 0, 1]  # 32 tokens a step
    ends = sorted(outputs, key=lambda i: max(n for n, b in enumerate(batches(core)) if i in b))
    assert ends == ["r0", "r1", "r2"]
    steps_of_oldest = [i for i, b in enumerate(batches(core)) if "r0" in b]
    assert steps_of_oldest == list(range(30))


def test_a_more_urgent_request_overtakes_and_survives_preemption():
    core = make_core(num_blocks=9, max_num_seqs=2, policy="priority", caching=False)
    core.add_request(numbered("low", 20, priority=5, max_tokens=40))
    core.step()
    core.add_request(numbered("later", 20, priority=5, start=9, max_tokens=4))
    core.add_request(numbered("high", 20, priority=1, start=20, max_tokens=40))
    outputs = run(core)
    last = {i: max(n for n, b in enumerate(batches(core)) if i in b) for i in outputs}
    assert last["high"] < min(last["low"], last["later"])
    assert [i for i, b in enumerate(batches(core)) if "high" in b] == list(range(1, 41))


def test_samples_of_one_prompt_compute_it_once():
    core = make_core(budget=64, max_model_len=128)
    for index in range(4):
        core.add_request(numbered(f"r{index}", 41, max_tokens=5))
    outputs = run(core)
    assert sum(n for b in batches(core) for n in b.values() if n > 1) == 41
    assert batches(core)[0] == {"r0": 41}
    assert list(batches(core)[1]) == ["r0", "r1", "r2", "r3"]
    assert [outputs[f"r{i}"][0].num_cached_tokens for i in range(4)] == [0, 40, 40, 40]


def test_prompts_that_share_a_short_beginning_are_not_held_back():
    core = make_core(budget=128)
    for index in range(3):
        prompt = [1] * BLOCK + [2 + index] * 20
        core.add_request(make_request(f"r{index}", prompt, max_tokens=1))
    run(core)
    assert batches(core)[0] == {"r0": 28, "r1": 28, "r2": 28}


def test_a_cached_prefix_is_reused_up_to_the_block_before_the_last_token():
    core = make_core(groups=(FULL, SLIDING))
    for name in ("a", "b"):
        core.add_request(numbered(name, 4 * BLOCK, max_tokens=1))
        outputs = run(core)
    assert outputs["b"][0].num_cached_tokens == 3 * BLOCK
    stats = core.scheduler.take_stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (0, 0), "reported by steps"


def test_the_prefix_counters_of_the_steps_add_up_to_the_hits():
    core = make_core()
    queries = hits = 0
    for name in ("a", "b"):
        core.add_request(numbered(name, 20, max_tokens=3))
        while core.has_work:
            stats = core.step().stats
            queries, hits = queries + stats.prefix_cache_queries, hits + stats.prefix_cache_hits
    assert (queries, hits) == (40, 16)


def test_a_salt_keeps_the_cache_of_its_requests_apart():
    core = make_core()
    salts = [None, "x" * 100 + "a", "x" * 100 + "b", "x" * 100 + "a"]
    cached = []
    for index, salt in enumerate(salts):
        core.add_request(numbered(f"r{index}", 20, salt=salt, max_tokens=1))
        cached.append(run(core)[f"r{index}"][0].num_cached_tokens)
    assert cached == [0, 0, 0, 16]


def test_a_sliding_window_frees_what_lies_behind_it():
    core = make_core(groups=(SLIDING,), budget=8)
    core.add_request(numbered("r", 30, max_tokens=30))
    held = []
    while core.has_work:
        core.step()
        held += [sum(b != 0 for b in r.block_tables[0]) for r in core.scheduler.running]
    assert max(held) <= SLIDING.blocks_per_sequence(60, BLOCK, 8) == 3


def test_a_reset_forgets_finished_and_running_prompts():
    core = make_core(threshold=4)
    core.add_request(numbered("done", 20, max_tokens=1))
    run(core)
    core.add_request(numbered("running", 20, start=30, max_tokens=12))
    core.step()  # half of its first block
    assert core.reset_prefix_cache() is True
    run(core)
    for name, start in (("done", 1), ("running", 30)):
        core.add_request(numbered(f"{name} again", 20, start=start, max_tokens=1))
        assert run(core)[f"{name} again"][0].num_cached_tokens == 0


def test_blocks_without_content_are_reused_first_and_the_ends_of_prompts_next():
    core = make_core(num_blocks=10)
    core.add_request(numbered("a", 5 * BLOCK + 1, max_tokens=1))
    run(core)  # 5 of the 9 blocks keep content
    core.add_request(make_request("b", [60] * (3 * BLOCK + 1), max_tokens=1))
    run(core)  # takes the 4 others, 3 of which keep content
    core.add_request(make_request("c", [59] * 2, max_tokens=1))
    run(core)
    core.add_request(make_request("d", [59] * (2 * BLOCK + 1), max_tokens=1))
    run(core)  # 1 without content and the last 2 of a
    core.add_request(numbered("a again", 5 * BLOCK + 1, max_tokens=1))
    assert run(core)["a again"][0].num_cached_tokens == 3 * BLOCK


def test_a_failed_request_ends_alone_and_leaves_nothing_in_the_cache():
    core = make_core()
    core.executor.failing["bad"] = "logits are not finite"
    core.add_request(numbered("bad", 20, max_tokens=5))
    core.add_request(numbered("good", 20, start=30, max_tokens=5))
    outputs = run(core)
    assert outputs["bad"][-1].finish_reason is FinishReason.ERROR
    assert outputs["bad"][-1].error == "logits are not finite"
    assert len(tokens_of(outputs["good"])) == 5
    core.add_request(numbered("bad again", 20, max_tokens=1))
    assert run(core)["bad again"][0].num_cached_tokens == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_no_step_is_spent_on_a_request_that_reached_its_length(async_scheduling):
    core = make_core(async_scheduling=async_scheduling)
    core.add_request(numbered("r", 10, max_tokens=7))
    outputs = run(core)
    assert len(tokens_of(outputs["r"])) == 7
    assert [b["r"] for b in batches(core)] == [10] + [1] * 6


def test_an_end_of_text_found_late_costs_one_token():
    prompt = next(
        p
        for p in ([k, 3, 5] for k in range(1, 60))
        if 2 < len(expected_tokens(p, make_request("", p).sampling_params, (FULL,), 64)) < 14
    )
    core = make_core(async_scheduling=True)
    core.add_request(make_request("r", prompt, max_tokens=30))
    tokens = tokens_of(run(core)["r"])
    assert tokens[-1] == EOS and tokens.index(EOS) == len(tokens) - 1
    assert sum(b["r"] for b in batches(core)) == len(prompt) + len(tokens) - 1 + 1


def test_two_steps_are_under_way_with_asynchronous_scheduling():
    core = make_core(async_scheduling=True)
    core.add_request(numbered("r", 10, max_tokens=7))
    core.step()
    assert len(batches(core)) == 2


@pytest.mark.parametrize(
    ("params", "reason", "stop_reason"),
    [
        ({}, FinishReason.STOP, None),
        ({"ignore_eos": True}, FinishReason.LENGTH, None),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, FinishReason.STOP, EOS),
        ({"stop_token_ids": [EOS]}, FinishReason.STOP, None),
        ({"min_tokens": 20}, FinishReason.LENGTH, None),
    ],
    ids=["eos", "ignored", "stop id", "eos before stop id", "before min_tokens"],
)
def test_why_a_request_stops(params, reason, stop_reason):
    prompt = next(
        p
        for p in ([k, 3, 5] for k in range(1, 60))
        if 2 < len(expected_tokens(p, make_request("", p).sampling_params, (FULL,), 64)) < 14
    )
    core = make_core()
    core.add_request(make_request("r", prompt, max_tokens=20, **params))
    last = run(core)["r"][-1]
    assert (last.finish_reason, last.stop_reason) == (reason, stop_reason)


@pytest.mark.parametrize("length", [62, 63, 64, 65])
def test_a_prompt_needs_room_for_one_token_in_the_context(length):
    core = make_core(max_model_len=64)
    core.add_request(numbered("r", length, max_tokens=None))
    (outputs,) = run(core).values()
    if length < 64:
        assert len(tokens_of(outputs)) == 64 - length
        assert outputs[-1].finish_reason is FinishReason.LENGTH
    else:
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert outputs[-1].stop_reason == "invalid-request"
        assert f"{length} tokens" in outputs[-1].error and "64" in outputs[-1].error


def test_a_sequence_ends_where_the_cache_does():
    core = make_core(num_blocks=5, max_model_len=64)
    assert core.scheduler.max_sequence_tokens == 32
    core.add_request(numbered("fits", 20, max_tokens=None))
    core.add_request(numbered("never", 40))
    outputs = run(core)
    assert len(tokens_of(outputs["fits"])) == 12
    assert "KV cache holds sequences of at most 32" in outputs["never"][-1].error


def test_an_empty_prompt_and_a_used_id_are_refused():
    core = make_core()
    core.add_request(make_request("empty", []))
    core.add_request(numbered("r", 5, max_tokens=2))
    with pytest.raises(RequestError, match="'r' is in use"):
        core.add_request(numbered("r", 5))
    outputs = run(core)
    assert outputs["empty"][-1].error == "the prompt is empty"
    assert len(tokens_of(outputs["r"])) == 2


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode", "preempted"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_abort_frees_everything_in_every_phase(phase, async_scheduling):
    core = make_core(
        budget=8, max_num_seqs=2, num_blocks=10, async_scheduling=async_scheduling, caching=False
    )
    core.add_request(numbered("other", 16, max_tokens=40))
    victim = numbered("victim", 20, start=9, max_tokens=40)
    if phase == "queued":
        core.add_request(numbered("another", 10, start=5, max_tokens=40))
    core.add_request(victim)
    done = {
        "queued": lambda r: True,
        "prefill": lambda r: 0 < r.num_computed_tokens < 20,
        "decode": lambda r: r.num_output_tokens > 1,
        "preempted": lambda r: r.status.name == "PREEMPTED",
    }[phase]
    while not done(core.scheduler.requests["victim"]):
        core.step()
    core.abort_requests(["victim"])
    assert "victim" not in core.scheduler.requests
    assert "victim" not in run(core)


def test_drafts_are_counted_by_position_and_shorten_the_run():
    core = make_core(drafts=3)
    request = numbered("r", 10, max_tokens=40)
    core.executor.answers["r"] = expected_tokens(
        request.prompt_token_ids, request.sampling_params, (FULL,), 64
    )
    core.add_request(request)
    drafts = drafted = accepted = 0
    by_position = [0, 0, 0]
    while core.has_work:
        stats = core.step().stats
        drafts += stats.num_drafts
        drafted += stats.num_draft_tokens
        accepted += stats.num_accepted_tokens
        for position, count in enumerate(stats.accepted_per_position):
            by_position[position] += count
    assert drafts < 30 and drafts < drafted <= 3 * drafts
    assert sum(by_position) == accepted and by_position == sorted(by_position, reverse=True)
    assert 1 + drafts + accepted >= 40


@pytest.mark.parametrize("mode", ["sync", "async", "draft"])
def test_a_grammar_is_asked_with_every_token_known(mode):
    core = make_core(async_scheduling=mode == "async", drafts=3 if mode == "draft" else 0)
    request = numbered("r", 10, max_tokens=40)
    request.sampling_params.structured_outputs = StructuredOutputsParams(regex="9")
    plain = numbered("plain", 10, start=20, max_tokens=20)
    for r, length in ((request, 9), (plain, None)):
        core.executor.answers[r.request_id] = expected_tokens(
            r.prompt_token_ids, r.sampling_params, (FULL,), 64, length
        )
        core.add_request(r)
    outputs = run(core)
    for request_id, answer in core.executor.answers.items():
        assert tokens_of(outputs[request_id]) == answer
    assert len(core.executor.answers["r"]) == 9
    assert outputs["r"][-1].finish_reason is FinishReason.STOP
    if mode == "async":  # the other request does not wait for the grammar
        plain_steps = [i for i, b in enumerate(batches(core)) if "plain" in b]
        assert plain_steps == list(range(plain_steps[0], plain_steps[0] + 20))


def test_a_grammar_that_cannot_be_compiled_refuses_its_request_alone():
    core = make_core()

    def refuse(constraint: StructuredOutputsParams) -> CountingGrammar:
        raise RequestError("the regex constraint cannot be used: [")

    core._compile_grammar = refuse
    bad = numbered("bad", 5)
    bad.sampling_params.structured_outputs = StructuredOutputsParams(regex="[")
    core.add_request(bad)
    core.add_request(numbered("good", 5, max_tokens=3))
    outputs = run(core)
    assert outputs["bad"][-1].stop_reason == "invalid-request"
    assert outputs["bad"][-1].error == "the regex constraint cannot be used: ["
    assert len(tokens_of(outputs["good"])) == 3


def test_a_token_that_the_grammar_forbids_ends_its_request_with_an_error():
    core = make_core()
    request = numbered("r", 5)
    request.sampling_params.structured_outputs = StructuredOutputsParams(regex="9")
    core.add_request(request)
    while "r" not in core.scheduler.requests:
        core.step()
    core.scheduler.requests["r"].grammar.accept = lambda token_ids: False
    last = run(core)["r"][-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.ERROR, "grammar")
    assert last.error == "not the token's turn"


def test_a_large_request_is_not_starved_by_a_stream_of_small_ones():
    core = make_core(num_blocks=12, max_num_seqs=3, budget=16)
    for index in range(3):
        core.add_request(numbered(f"early{index}", 10, start=index, max_tokens=5 + index))
    core.step()
    core.add_request(numbered("large", 60, max_tokens=2))
    for index in range(20):
        core.add_request(numbered(f"late{index}", 10, start=index, max_tokens=5))
        core.step()
    run(core)
    first: dict[str, int] = {}
    for step, batch in enumerate(batches(core)):
        for request_id in batch:
            first.setdefault(request_id, step)
    assert all(first["large"] < first[f"late{i}"] for i in range(20))


def test_the_core_imports_no_torch_before_it_loads_a_model():
    code = (
        "import sys, vllm.engine.client, vllm.engine.core_process, vllm.engine.scheduler;"
        "print([m for m in ('torch', 'numpy', 'transformers', 'llguidance') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
