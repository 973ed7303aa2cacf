# SPDX-License-Identifier: Apache-2.0
"""From the core's messages to `RequestOutput`, in every output kind."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.fixtures.tiny_models import tiny_checkpoint
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.input_processor import InputProcessor
from vllm.engine.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, TokenLogprobs
from vllm.engine.output_processor import OutputProcessor, RequestFailed
from vllm.errors import RequestError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import get_tokenizer

TEXT = "Gr\u00fc\u00dfe, \u4f60\u597d"


@functools.cache
def parts() -> tuple[Any, InputProcessor]:
    """Tokenizer and input processor of the tiny llama."""
    config = EngineArgs(model=str(tiny_checkpoint("llama"))).create_engine_config()
    tokenizer = get_tokenizer(config.model_config)
    return tokenizer, InputProcessor(config, tokenizer)


def run(
    ids: list[int],
    last: FinishReason | None = FinishReason.LENGTH,
    **options: Any,
) -> tuple[list[RequestOutput], list[str]]:
    """Feed one token a step; what the caller gets, and what the core is told to end."""
    tokenizer, inputs = parts()
    processor = OutputProcessor(tokenizer)
    processor.add(inputs.process("r", "hello", SamplingParams(max_tokens=100, **options)))
    outputs, aborts = [], []
    for at, token_id in enumerate(ids):
        reason = last if at == len(ids) - 1 else None
        logprobs = None
        if options.get("logprobs") is not None:
            logprobs = [TokenLogprobs([token_id, 5], [-1.0 - at, -0.5], [2, 1])]
        output = EngineCoreOutput("r", [token_id], reason, logprobs=logprobs)
        processed = processor.process(EngineCoreOutputs([output], None, float(at)))
        outputs += processed.outputs
        aborts += processed.aborts
    return outputs, aborts


def test_every_output_kind_tells_the_same_story() -> None:
    ids = parts()[0].encode(TEXT)
    (final,), _ = run(ids, output_kind=RequestOutputKind.FINAL_ONLY)
    deltas, _ = run(ids, output_kind=RequestOutputKind.DELTA)
    growing, _ = run(ids, output_kind=RequestOutputKind.CUMULATIVE)
    assert final.outputs[0].text == TEXT == growing[-1].outputs[0].text
    assert "".join(d.outputs[0].text for d in deltas) == TEXT
    assert [i for d in deltas for i in d.outputs[0].token_ids] == ids
    assert final.outputs[0].token_ids == growing[-1].outputs[0].token_ids == ids
    for output in growing:
        assert TEXT.startswith(output.outputs[0].text)
    assert [o.finished for o in growing] == [False] * (len(ids) - 1) + [True]
    assert final.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_stop_string_ends_the_request_and_tells_the_core(kind: RequestOutputKind) -> None:
    ids = parts()[0].encode(TEXT)
    outputs, aborts = run(ids, None, output_kind=kind, stop=["\u00dfe,"])
    assert aborts == ["r"]
    text = "".join(o.outputs[0].text for o in outputs)
    if kind is not RequestOutputKind.DELTA:
        text = outputs[-1].outputs[0].text
    assert text == "Gr\u00fc"
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert outputs[-1].outputs[0].stop_reason == "\u00dfe,"


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_the_end_token_is_no_text_even_with_special_tokens_shown(kind: RequestOutputKind) -> None:
    ids = [*parts()[0].encode("hi"), 2]
    options: dict[str, Any] = {"skip_special_tokens": False, "output_kind": kind}
    outputs, _ = run(ids, FinishReason.STOP, **options)
    text = "".join(o.outputs[0].text for o in outputs)
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert (text if kind is RequestOutputKind.DELTA else outputs[-1].outputs[0].text) == "hi"


def test_logprobs_add_up_and_are_dealt_out_with_their_tokens() -> None:
    ids = parts()[0].encode("hey")
    (final,), _ = run(ids, logprobs=1, output_kind=RequestOutputKind.FINAL_ONLY)
    entries = final.outputs[0].logprobs
    assert entries is not None
    assert [e[i].logprob for e, i in zip(entries, ids, strict=True)] == [-1.0, -2.0, -3.0][
        : len(ids)
    ]
    assert final.outputs[0].cumulative_logprob == sum(-1.0 - n for n in range(len(ids)))
    deltas, _ = run(ids, logprobs=1, output_kind=RequestOutputKind.DELTA)
    assert [d.outputs[0].logprobs for d in deltas] == [[e] for e in entries]


def test_of_n_sequences_the_final_output_waits_for_all() -> None:
    tokenizer, inputs = parts()
    processor = OutputProcessor(tokenizer)
    params = SamplingParams(n=2, seed=5, output_kind=RequestOutputKind.FINAL_ONLY)
    request = inputs.process("r", "hello", params)
    assert [s.request_id for s in request.sequences] == ["0_r", "1_r"]
    assert [s.sampling_params.seed for s in request.sequences] == [5, 6]
    processor.add(request)

    def step(request_id: str) -> list[RequestOutput]:
        output = EngineCoreOutput(request_id, [70], FinishReason.LENGTH)
        return processor.process(EngineCoreOutputs([output], None, 0.0)).outputs

    assert step("1_r") == []
    (done,) = step("0_r")
    assert [c.index for c in done.outputs] == [0, 1]
    assert processor.num_unfinished == 0


def test_a_failed_sequence_fails_its_request_and_ends_its_siblings() -> None:
    tokenizer, inputs = parts()
    for reason, kind in (("invalid-request", RequestError), ("internal-error", RequestFailed)):
        processor = OutputProcessor(tokenizer)
        processor.add(inputs.process("r", "hello", SamplingParams(n=3)))
        failed = EngineCoreOutput("1_r", [], FinishReason.ERROR, reason, error="not finite")
        processed = processor.process(EngineCoreOutputs([failed], None, 0.0))
        ((request_id, error),) = processed.errors
        assert request_id == "r" and isinstance(error, kind) and "not finite" in str(error)
        assert processed.aborts == ["0_r", "2_r"]
        assert processor.num_unfinished == 0


def test_what_comes_after_an_abort_is_ignored() -> None:
    tokenizer, inputs = parts()
    processor = OutputProcessor(tokenizer)
    processor.add(inputs.process("r", "hello", SamplingParams()))
    with pytest.raises(RequestError, match="in use"):
        processor.add(inputs.process("r", "hello", SamplingParams()))
    assert processor.remove("r") == ["r"]
    late = EngineCoreOutput("r", [70])
    assert processor.process(EngineCoreOutputs([late], None, 0.0)).outputs == []


def test_bad_words_become_ids_at_the_start_and_after_a_space() -> None:
    tokenizer, inputs = parts()
    request = inputs.process("r", "hello", SamplingParams(bad_words=["fox"]))
    words = request.sampling_params.bad_words_token_ids
    assert words is not None
    assert [tokenizer.decode(ids) for ids in words] == ["fox", " fox"]


def test_times_of_a_request_are_taken_from_the_cores_clock() -> None:
    tokenizer, inputs = parts()
    processor = OutputProcessor(tokenizer, log_stats=True)
    processor.add(inputs.process("r", [70, 71], SamplingParams(), arrival_time=1.0))
    first = EngineCoreOutput("r", [70], scheduled_time=2.0, num_cached_tokens=1)
    stats = processor.process(EngineCoreOutputs([first], None, 4.0)).stats
    assert stats is not None and stats.times_to_first_token_s == [3.0]
    last = EngineCoreOutput("r", [71], FinishReason.LENGTH)
    stats = processor.process(EngineCoreOutputs([last], None, 4.5)).stats
    assert stats is not None and stats.inter_token_latencies_s == [0.5]
    (ended,) = stats.finished
    assert (ended.queued_s, ended.prefill_s, ended.decode_s, ended.e2e_s) == (1.0, 2.0, 0.5, 3.5)
    assert ended.num_cached_tokens == 1
