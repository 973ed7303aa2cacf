# SPDX-License-Identifier: Apache-2.0
"""Inkling over HTTP: its renderer and parsers in a real server, by OpenAI's client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.entrypoints.openai.server_process import Server, running_server
from tests.fixtures.tiny_models import tiny_checkpoint
from tests.tokenizers.test_inkling import inkling_tokenizer
from vllm.tokenizers.inkling import EFFORTS, MARKERS, marker_ids

IDS = marker_ids(inkling_tokenizer())  # the markers' ids in the checkpoint below as well
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A tiny Inkling whose tokenizer has the markers; nothing but the parsers is asked for."""
    checkpoint = tiny_checkpoint(
        "inkling-text",
        [f"<|{name}|>" for name in MARKERS],
        vocab_size=544,
        unpadded_vocab_size=540,
        num_mtp_layers=0,
        eos_token_id=IDS["content_model_end_sampling"],
    )
    flags = ("--reasoning-parser", "inkling", "--tool-call-parser", "inkling")
    with running_server(
        checkpoint, "--dtype", "float32", "--served-model-name", "tiny",
        "--enable-auto-tool-choice", *flags,
    ) as process:  # fmt: skip
        yield process


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of it."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, **options: Any) -> Any:
    """An answer, random but repeatable: a random model writes every kind of block."""
    options = {"messages": [USER], "max_tokens": 48, "temperature": 1.0, "seed": 3, **options}
    return client.chat.completions.create(model="tiny", **options)


def streamed(client: openai.OpenAI, **options: Any) -> dict[str, Any]:
    """The same of a stream, its deltas joined."""
    content, reasoning, reason, usage = "", "", None, None
    calls: dict[int, tuple[str, str]] = {}
    options["stream_options"] = {"include_usage": True}
    for chunk in ask(client, stream=True, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                name, arguments = calls.get(call.index, ("", ""))
                written = call.function.arguments or ""
                calls[call.index] = (call.function.name or name, arguments + written)
    return {
        "content": content, "reasoning": reasoning, "calls": list(calls.values()),
        "reason": reason, "usage": _counts(usage),
    }  # fmt: skip


def whole(client: openai.OpenAI, **options: Any) -> dict[str, Any]:
    """The same of an answer in one piece."""
    answer = ask(client, **options)
    message = answer.choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning_content", None) or "",
        "calls": calls,
        "reason": answer.choices[0].finish_reason,
        "usage": _counts(answer.usage),
    }


def _counts(usage: Any) -> tuple[int, int, int]:
    details = usage.completion_tokens_details
    return usage.prompt_tokens, usage.completion_tokens, details.reasoning_tokens


def written(answer: str) -> dict[str, Any]:
    """Options that make the model write this: text between markers, the end behind it."""
    pieces = re.split(r"(<\|\w+\|>)", answer)
    rule = " ".join(p if p.startswith("<|") else json.dumps(p) for p in pieces if p)
    return {"extra_body": {"structured_outputs": {"grammar": f"start: {rule}"}}, "max_tokens": 300}


CALL = '<|content_invoke_tool_json|>{"name":"f","args":{"a": "\u4f60"}}<|end_message|>'
THOUGHT = "<|content_thinking|>hm, so \n<|end_message|><|message_model|>"


@pytest.mark.parametrize("ask_in", [whole, streamed])
def test_thinking_text_and_calls_arrive_in_their_fields(ask_in: Any, client: openai.OpenAI) -> None:
    text = "<|content_text|>Let me see<|end_message|><|message_model|>"
    answer = ask_in(
        client, tools=[TOOL], **written(f"{THOUGHT}{text}f{CALL}<|message_model|>f{CALL}")
    )
    usage = answer.pop("usage")
    assert answer == {
        "content": "Let me see",
        "reasoning": "hm, so",
        "calls": [("f", '{"a": "\u4f60"}')] * 2,
        "reason": "tool_calls",
    }
    assert 3 <= usage[2] <= len("hm, so \n")


@pytest.mark.parametrize("ask_in", [whole, streamed])
def test_a_call_without_tools_in_the_request_is_content(ask_in: Any, client: openai.OpenAI) -> None:
    answer = ask_in(client, **written(f"f{CALL}"))
    assert answer["content"] == '{"name":"f","args":{"a": "\u4f60"}}'
    assert (answer["calls"], answer["reason"]) == ([], "stop")


@pytest.mark.parametrize("ask_in", [whole, streamed])
def test_structured_output_is_the_text_block_and_thinking_stays_free(
    ask_in: Any, client: openai.OpenAI
) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    # A random model would think for ever: the text opener is made likely.
    bias = {str(IDS["content_text"]): 50, str(IDS["end_message"]): 50}
    answer = ask_in(client, response_format=schema, logit_bias=bias, max_tokens=200)
    assert json.loads(answer["content"]) in ({"a": 1}, {"a": 2})
    assert (answer["calls"], answer["reason"]) == ([], "stop")


@pytest.mark.parametrize(
    ("constraint", "allowed"),
    [
        ({"choice": ["yes/no", '"']}, r'yes/no|"'),
        ({"regex": r"a/b\/[/c]\d\n"}, r"a/b/[/c]\d\n"),
        ({"json_object": True}, r"(?s)\{.*\}"),
    ],
    ids=["choice", "regex", "json object"],
)
def test_other_constraints_hold_for_the_text_block(
    client: openai.OpenAI, constraint: dict[str, Any], allowed: str
) -> None:
    bias = {str(IDS["content_text"]): 50, str(IDS["end_message"]): 50}
    answer = whole(client, extra_body={"structured_outputs": constraint}, logit_bias=bias)
    if answer["reason"] == "stop":
        assert re.fullmatch(allowed, answer["content"])
    else:
        assert constraint == {"json_object": True}, answer  # it may write for ever


def test_a_schema_that_is_none_is_a_400(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError, match="constraint cannot be used"):
        ask(client, response_format=schema)


@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["no tools", "tools"])
@pytest.mark.parametrize("effort", EFFORTS)
def test_no_marker_reaches_a_client_and_a_stream_joins_to_the_whole_answer(
    client: openai.OpenAI, effort: str, tools: tuple[Any, ...]
) -> None:
    # All markers likely: blocks of every kind, in any order.
    bias = {
        str(IDS[name]): 3.0 for name in MARKERS if name.startswith(("content", "end", "message"))
    }
    options: dict[str, Any] = {
        "extra_body": {"chat_template_kwargs": {"reasoning_effort": effort}},
        "logit_bias": bias,
    }
    if tools:
        options["tools"] = list(tools)
    answer = whole(client, **options)
    assert answer == streamed(client, **options)
    assert not any(f"<|{name}|>" in answer["content"] + answer["reasoning"] for name in MARKERS)


def test_the_effort_field_of_openai_is_the_templates_argument(client: openai.OpenAI) -> None:
    num_prompt_tokens = [
        ask(client, max_tokens=1, **options).usage.prompt_tokens
        for options in (
            {"reasoning_effort": "none"},
            {"extra_body": {"chat_template_kwargs": {"reasoning_effort": "none"}}},
            {},
        )
    ]
    assert num_prompt_tokens[0] == num_prompt_tokens[1] == num_prompt_tokens[2] - 2  # "0", "0.9"


def test_an_unknown_effort_is_a_400_that_lists_the_names(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body={"chat_template_kwargs": {"reasoning_effort": "extreme"}})
    assert all(name in str(caught.value) for name in EFFORTS)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ],
    ids=["image", "audio"],
)
def test_an_image_or_audio_part_is_a_400_that_says_text_only(
    client: openai.OpenAI, part: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match="takes text only"):
        ask(client, messages=[{"role": "user", "content": [part]}])


def test_a_tool_choice_that_names_no_tool_is_a_400(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    with pytest.raises(openai.BadRequestError, match="names no function"):
        ask(client, tools=[TOOL], tool_choice=choice)


def test_a_whole_tool_conversation_is_rendered(client: openai.OpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
    result = {"role": "tool", "tool_call_id": "c", "content": "sunny"}
    answer = ask(client, messages=[USER, turn, result], tools=[TOOL], max_tokens=1)
    assert answer.usage.prompt_tokens > 60
