# SPDX-License-Identifier: Apache-2.0
"""`LLM` on a tiny model: forms of prompts, order, options, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fixtures.tiny_models import tiny_checkpoint
from vllm import LLM, SamplingParams
from vllm.errors import RequestError

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
PROMPTS = [f"Prompt number {n}: once upon" for n in range(32)]


def _make(**settings: Any) -> LLM:
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, **settings}
    return LLM(model=str(tiny_checkpoint("llama")), **settings)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The tiny llama in float32."""
    made = _make()
    yield made
    made.shutdown()


def texts(outputs: Any) -> list[str]:
    """First continuation of each."""
    return [output.outputs[0].text for output in outputs]


def test_every_form_of_a_prompt_gives_the_same_text(llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = PROMPTS[0]
    ids = llm.tokenizer.encode(text)
    forms: list[Any] = [text, [text], ids, [ids], {"prompt": text}, [{"prompt_token_ids": ids}]]
    params = SamplingParams(**GREEDY)
    results = [llm.generate(form, params, use_tqdm=False) for form in forms]
    assert all(len(result) == 1 for result in results)
    assert len({texts(result)[0] for result in results}) == 1
    assert [r[0].prompt for r in results] == [text, text, None, None, text, None]
    assert all(r[0].prompt_token_ids == ids for r in results)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(**{**GREEDY, "max_tokens": 33 - n}) for n in range(1, 33)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == PROMPTS
    assert [len(o.outputs[0].token_ids) for o in outputs] == [33 - n for n in range(1, 33)]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


def test_alone_in_a_batch_and_with_or_without_prefix_caching_the_text_is_the_same(
    llm: LLM,
) -> None:
    params = SamplingParams(**GREEDY)
    together = texts(llm.generate(PROMPTS, params, use_tqdm=False))
    alone = [texts(llm.generate(p, params, use_tqdm=False))[0] for p in PROMPTS[:6]]
    again = llm.generate(PROMPTS, params, use_tqdm=False)
    assert any((o.num_cached_tokens or 0) > 0 for o in again)
    uncached = _make(enable_prefix_caching=False)
    try:
        without = texts(uncached.generate(PROMPTS, params, use_tqdm=False))
    finally:
        uncached.shutdown()
    assert together == texts(again) == without
    assert together[:6] == alone


def test_n_gives_that_many_different_samples_and_a_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, n=4, seed=11, max_tokens=12)
    first = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
    second = llm.generate([*PROMPTS[1:9], PROMPTS[0]], params, use_tqdm=False)[-1]
    assert [c.index for c in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in first.outputs}) == 4
    assert [c.token_ids for c in second.outputs] == [c.token_ids for c in first.outputs]


def test_text_made_at_the_end_equals_text_made_for_stop_strings(llm: LLM) -> None:
    plain = llm.generate(PROMPTS, SamplingParams(**GREEDY), use_tqdm=False)
    stepwise = llm.generate(PROMPTS, SamplingParams(**GREEDY, stop="\x00never"), use_tqdm=False)
    assert texts(plain) == texts(stepwise)


def test_a_stop_string_cuts_text_and_tokens(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], SamplingParams(**GREEDY), use_tqdm=False)[0].outputs[0]
    stop = whole.text[8:10]
    params = SamplingParams(**GREEDY, stop=[stop])
    cut = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(whole.token_ids)


def test_a_stop_token_stays_in_the_ids_and_out_of_the_text(llm: LLM) -> None:
    assert llm.tokenizer is not None
    whole = llm.generate(PROMPTS[0], SamplingParams(**GREEDY), use_tqdm=False)[0].outputs[0]
    stop = whole.token_ids[5]
    at = whole.token_ids.index(stop)
    for include in (False, True):
        params = SamplingParams(**GREEDY, stop_token_ids=[stop], include_stop_str_in_output=include)
        cut = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
        assert cut.token_ids == whole.token_ids[: at + 1]
        assert cut.stop_reason == stop
        shown = cut.token_ids if include else cut.token_ids[:-1]
        assert cut.text == llm.tokenizer.decode_continuation(shown, True)


def test_logprobs_hold_the_chosen_token_and_the_likeliest_ones(llm: LLM) -> None:
    params = SamplingParams(**GREEDY, logprobs=3, prompt_logprobs=2)
    output = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token_id].rank == 1
        assert sorted(e.rank or 0 for e in entry.values()) == [1, 2, 3]
    total = sum(
        e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token_id, given in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
    ):
        assert given is not None and token_id in given and len(given) in (2, 3)


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    one: Any = [{"role": "user", "content": "hi"}]
    two = [{"role": "user", "content": [{"type": "text", "text": "bye"}]}]
    params = SamplingParams(**GREEDY)
    both = llm.chat([one, two], params, use_tqdm=False)
    assert texts(llm.chat(one, params, use_tqdm=False)) == texts(both)[:1]
    assert both[1].prompt == "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"
    begun: Any = [*one, {"role": "assistant", "content": "Well,"}]
    options: dict[str, Any] = {"continue_final_message": True, "use_tqdm": False}
    continued = llm.chat(begun, params, **options)[0]
    assert continued.prompt is not None and continued.prompt.endswith("assistant\nWell,")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([[]], "prompt"),
        ([600], "prompt"),
        ("x " * 600, "prompt"),
        ({"prompt": "a", "multi_modal_data": {}}, "prompt"),
        ([1.5], "prompt"),
        (7, "prompt"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM, prompt: Any, param: str) -> None:
    params = SamplingParams(**GREEDY)
    batch: Any = prompt if isinstance(prompt, int) else [PROMPTS[0], prompt]
    if isinstance(prompt, list) and prompt == [[]]:
        batch = [PROMPTS[0], []]
    with pytest.raises(RequestError) as caught:
        llm.generate(batch, params, use_tqdm=False)
    assert caught.value.param == param
    assert llm.generate(PROMPTS[0], params, use_tqdm=False)[0].finished


def test_a_request_that_the_core_refuses_leaves_the_engine_usable(llm: LLM) -> None:
    from vllm import StructuredOutputsParams

    bad = SamplingParams(**GREEDY, structured_outputs=StructuredOutputsParams(regex="("))
    params = SamplingParams(**GREEDY)
    with pytest.raises(RequestError):
        llm.generate(PROMPTS[:2], [params, bad], use_tqdm=False)
    assert texts(llm.generate(PROMPTS[:2], params, use_tqdm=False)) == texts(
        llm.generate(PROMPTS[:2], params, use_tqdm=False)
    )


def test_lists_of_different_lengths_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts have 1 sampling parameters"):
        llm.generate(PROMPTS[:2], [SamplingParams()], use_tqdm=False)


def test_the_progress_bar_changes_nothing(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(**GREEDY)
    assert texts(llm.generate(PROMPTS[:2], params)) == texts(
        llm.generate(PROMPTS[:2], params, use_tqdm=False)
    )
    assert capsys.readouterr().out == ""
