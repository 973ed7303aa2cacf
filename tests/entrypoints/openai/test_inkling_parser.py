# SPDX-License-Identifier: Apache-2.0
"""Inkling's answers by token: blocks, calls, and any way of cutting the stream."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.entrypoints.openai.test_parsers import Answer, joined
from tests.tokenizers.test_inkling import inkling_tokenizer
from vllm.entrypoints.openai.parsers.inkling import InklingParser
from vllm.tokenizers.inkling import MARKERS, marker_ids

CALL = '<|content_invoke_tool_json|>{"name":"f","args":{"a":1}}<|end_message|>'
SHOWN_MARKERS = [f"<|{name}|>" for name in MARKERS]
END = "<|end_message|><|content_model_end_sampling|>"


def parse(text: str, step: int = 10**6, *, split: bool = True, prompt: str = "") -> Answer:
    """Feed the ids of a text in steps, as the engine does: the last token is the stop token."""
    tokenizer = inkling_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    parser = InklingParser(
        tokenizer,
        tokenizer.encode(prompt or "<|message_model|>"),
        split_reasoning=split,
        split_tools=split,
    )
    events = []
    shown = (
        ids[:-1] if ids and ids[-1] == marker_ids(tokenizer)["content_model_end_sampling"] else ids
    )
    given_text = ""
    for at in range(0, len(ids), step):
        so_far = tokenizer.token_bytes(False)
        whole = b"".join(so_far[i] for i in shown[: at + step]).decode("utf-8", "ignore")
        if at + step >= len(ids):
            whole = tokenizer.decode_continuation(shown, False)
        events += parser.feed(whole[len(given_text) :], ids[at : at + step])
        given_text = whole
    return joined(events + parser.finish())


CASES = {
    "text": (f"<|content_text|>Hi there{END}", ("", "Hi there", [])),
    "thinking and text": (
        f"<|content_thinking|>hm \n<|end_message|><|message_model|><|content_text|>A{END}",
        ("hm", "A", []),
    ),
    "call": (f"f{CALL}<|content_model_end_sampling|>", ("", "", [("f", '{"a":1}')])),
    "two calls and text": (
        f"f{CALL}<|message_model|>f{CALL}<|message_model|><|content_text|>ok{END}",
        ("", "ok", [("f", '{"a":1}')] * 2),
    ),
    "white space before a call": (
        f"<|content_text|> \n<|end_message|><|message_model|>f{CALL}",
        ("", "", [("f", '{"a":1}')]),
    ),
    "a call inside thinking ends it": (
        f"<|content_thinking|>hm<|message_model|>f{CALL}",
        ("hm", "", [("f", '{"a":1}')]),
    ),
    "no kind": (f"just text{END}", ("", "just text", [])),
    "no arguments": (
        '<|content_invoke_tool_json|>{"name":"f"}<|end_message|>',
        ("", "", [("f", "{}")]),
    ),
    "arguments that are no object": (
        '<|content_invoke_tool_json|>{"name":"f","args":[1]}<|end_message|>',
        ("", '{"name":"f","args":[1]}', []),
    ),
    "cut off in a call": ('<|content_invoke_tool_json|>{"na', ("", '{"na', [])),
    "unused tokens": (f"<|content_text|>a<|unused_200012|>b{END}", ("", "ab", [])),
}


@pytest.mark.parametrize("step", [1, 2, 3, 10**6])
@pytest.mark.parametrize("name", CASES)
def test_blocks_become_reasoning_content_and_calls(name: str, step: int) -> None:
    text, expected = CASES[name]
    assert parse(text, step) == expected


def test_without_parsers_thinking_and_calls_are_content_without_markers() -> None:
    text = f"<|content_thinking|>hm<|end_message|><|message_model|>f{CALL}"
    assert parse(text, split=False) == ("", 'hm{"name":"f","args":{"a":1}}', [])


def test_the_prompt_tells_which_block_is_open() -> None:
    assert parse(f"hm{END}", prompt="<|message_model|><|content_thinking|>") == ("hm", "", [])
    assert parse(f"hm{END}", prompt="<|message_model|><|content_text|>") == ("", "hm", [])


def test_text_behind_a_stop_string_is_not_given() -> None:
    tokenizer = inkling_tokenizer()
    ids = tokenizer.encode("<|content_text|>one STOP two")
    parser = InklingParser(tokenizer, [], split_reasoning=True, split_tools=True)
    events = parser.feed("<|content_text|>one ", ids)
    assert joined(events + parser.finish()) == ("", "one ", [])


def call_block(json_text: str) -> str:
    return f"f<|content_invoke_tool_json|>{json_text}<|end_message|>"


@pytest.mark.parametrize("step", [1, 3, 10**6])
@pytest.mark.parametrize(
    ("block", "arguments"),
    [
        ('{"name":"f","args":{"z": 1, "a":[1.0,1e400]}}', '{"z": 1, "a":[1.0,1e400]}'),
        (' { "args" : {"a":"}\\""} , "name" : "f" } ', '{"a":"}\\""}'),
        ('{"name":"f","arguments":{"a":1}}', '{"a":1}'),
        ('{"name":"f","parameters":{}}', "{}"),
        ("{&quot;name&quot;:&quot;f&quot;,&quot;args&quot;:{&quot;a&quot;:1}}", '{"a":1}'),
        ('{"name":"f","args":{"a":"&quot;"}}', '{"a":"&quot;"}'),
        ('{"name":"f","args":{"a":"one\ntwo"}}', '{"a": "one\\ntwo"}'),
        ('{"name":"f","args":{"a":"\\ud83d"}}', '{"a":"\\ud83d"}'),
        ('{"name":"f","args":{"a":"\u4f60"}}', '{"a":"\u4f60"}'),
        (f'{{"name":"f","args":{{"a":{"9" * 5000}}}}}', f'{{"a":{"9" * 5000}}}'),
        ('{"name":"g","name":"f","args":{}}', "{}"),
    ],
    ids=[
        "verbatim", "spaces and arguments first", "arguments", "parameters", "entities",
        "an entity that is meant", "line end", "half a pair", "wide", "long number", "name twice",
    ],
)  # fmt: skip
def test_imperfect_calls_are_read_and_their_arguments_kept(
    block: str, arguments: str, step: int
) -> None:
    assert parse(call_block(block), step) == ("", "", [("f", arguments)])
    json.loads(parse(call_block(block))[2][0][1], parse_int=float)


@pytest.mark.parametrize("step", [1, 3, 10**6])
@pytest.mark.parametrize(
    "block",
    [
        "no JSON", "{", "[]", "7", "null", '"f"', '{"args":{}}', '{"name":5,"args":{}}',
        '{"name":"f","args":"{}"}', '{"name":"f","args":null}', '{"name":"f","args":{"a":NaN}}',
        '{"name":"\\ud83d","args":{}}', '{"name":"f","args":{"a":1}} and more',
        '{"name":"f","args":{"a":1,}}', "[" * 5000,
    ],
)  # fmt: skip
def test_a_block_that_is_no_call_is_content(block: str, step: int) -> None:
    assert parse(call_block(block), step) == ("", block, [])


def test_tokens_of_thinking_are_counted_without_its_markers() -> None:
    tokenizer = inkling_tokenizer()
    thought = "so many words"
    text = f"<|content_thinking|>{thought}<|end_message|><|message_model|><|content_text|>A{END}"
    parser = InklingParser(tokenizer, [], split_reasoning=False, split_tools=False)
    parser.feed(text, tokenizer.encode(text))
    assert parser.num_reasoning_tokens == len(tokenizer.encode(thought))


def test_white_space_that_is_the_whole_answer_is_given() -> None:
    assert parse("<|content_text|> \n") == ("", " \n", [])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from([*(f"<|{m}|>" for m in MARKERS), "a", " ", "\u4f60", CALL]), max_size=10
    ),
    st.integers(1, 5),
)
def test_no_answer_raises_leaks_a_marker_or_depends_on_its_cuts(
    parts: list[str], step: int
) -> None:
    text = "".join(parts)
    reasoning, content, calls = parse(text, step)
    assert (reasoning, content, calls) == parse(text)
    assert "<|" not in reasoning + content
