# SPDX-License-Identifier: Apache-2.0
"""Thinking and tool calls: every way of cutting the text gives the same answer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.entrypoints.openai.parsers import Event, ParserNeeds, make_parser
from vllm.entrypoints.openai.parsers.tools import forced_schema

QWEN = ParserNeeds("qwen3", "hermes")
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "K\u00f6ln", "n": 2}}\n</tool_call>'
Answer = tuple[str, str, list[tuple[str, str]]]


def joined(events: list[Event]) -> Answer:
    """(reasoning, content, [(name, arguments)]) of all events."""
    calls: dict[int, tuple[str, str]] = {}
    for event in events:
        if event.kind == "tool_call":
            assert event.index == len(calls)
            calls[event.index] = (event.name, "")
        elif event.kind == "tool_arguments":
            name, arguments = calls[event.index]
            calls[event.index] = (name, arguments + event.text)
    text = {
        kind: "".join(e.text for e in events if e.kind == kind) for kind in ("reasoning", "content")
    }
    return text["reasoning"], text["content"], list(calls.values())


def parse(needs: ParserNeeds, pieces: list[str], prompt: str = "") -> Answer:
    """Feed pieces and join what comes out."""
    parser = make_parser(needs, prompt)
    if parser is None:
        return "", "".join(pieces), []
    events = [event for piece in pieces for event in parser.feed(piece, [])]
    return joined(events + parser.finish())


ARGUMENTS = '{"city": "K\u00f6ln", "n": 2}'
CASES = {
    "plain": ("Hello there.", ("", "Hello there.", [])),
    "thinking": ("<think>\nhm\n</think>\n\nYes.", ("\nhm\n", "Yes.", [])),
    "unfinished thinking": ("<think>hm", ("hm", "", [])),
    "call": (CALL, ("", "", [("get", ARGUMENTS)])),
    "thinking and calls": (
        f"<think>a</think>\n\nLet me.\n{CALL}\n{CALL}",
        ("a", "Let me.", [("get", ARGUMENTS)] * 2),
    ),
    "text after a call": (f"{CALL}\nDone.", ("", "\nDone.", [("get", ARGUMENTS)])),
    "cut off in a call": ("Hi <tool_call>{", ("", "Hi<tool_call>{", [])),
    "no JSON": ("<tool_call>oops</tool_call>", ("", "<tool_call>oops</tool_call>", [])),
    "no name": ("<tool_call>{}</tool_call>", ("", "<tool_call>{}</tool_call>", [])),
    "entities": (
        "<tool_call>{&quot;name&quot;: &quot;f&quot;, &quot;arguments&quot;: {}}</tool_call>",
        ("", "", [("f", "{}")]),
    ),
    "raw line breaks in a string": (
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
        ("", "", [("f", '{"a": "x\\ny"}')]),
    ),
    "a bracket that is no tag": ("a < b <to c", ("", "a < b <to c", [])),
    "spaces only": ("  \n", ("", "  \n", [])),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_split_into_thinking_text_and_calls(name: str) -> None:
    text, expected = CASES[name]
    assert parse(QWEN, [text]) == expected
    assert parse(QWEN, list(text)) == expected


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "a", "\n"]),
        max_size=8,
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=30),
)
def test_no_text_raises_and_no_split_changes_the_answer(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    pieces, at, turn = [], 0, 0
    while at < len(text):
        pieces.append(text[at : at + cuts[turn % len(cuts)]])
        at += cuts[turn % len(cuts)]
        turn += 1
    assert parse(QWEN, pieces) == parse(QWEN, [text])


def test_the_prompt_tells_whether_thinking_is_open_or_off() -> None:
    text = "because</think>So."
    opened = "<|im_start|>assistant\n<think>\n"
    closed = opened + "\n</think>\n\n"
    assert parse(QWEN, [text], opened) == ("because", "So.", [])
    assert parse(QWEN, ["So."], closed) == ("", "So.", [])
    assert parse(ParserNeeds("deepseek_r1"), [text]) == ("because", "So.", [])
    assert parse(ParserNeeds("deepseek_r1"), ["<think>" + text]) == ("because", "So.", [])
    assert parse(ParserNeeds(), [text], opened) == ("", text, [])


def test_forced_calls_are_read_from_what_their_schema_allows() -> None:
    functions = [{"name": "f", "parameters": {"type": "object"}}, {"name": "g"}]
    tools = [{"type": "function", "function": function} for function in functions]
    schema = forced_schema(tools, None)
    names = [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]]
    assert names == ["f", "g"]
    assert forced_schema(tools, "f") == {"type": "object"}
    answer = json.dumps([{"name": "g", "parameters": {}}, {"name": "f", "parameters": {"a": 1}}])
    required = ParserNeeds(force_tools=True)
    assert parse(required, list(answer)) == ("", "", [("g", "{}"), ("f", '{"a": 1}')])
    assert parse(required, ['[{"na']) == ("", '[{"na', [])
    named = ParserNeeds(force_tools=True, forced_tool="f")
    assert parse(named, ['{"a"', ": 1}"]) == ("", "", [("f", '{"a": 1}')])
