# SPDX-License-Identifier: Apache-2.0
"""Tool calls: Hermes' <tool_call> blocks, and answers that a grammar forced to be calls."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.parsers.events import Event, partial_match_length

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesToolParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times.

    A call is given when its block is whole. A block that is no call is given as content;
    white space around calls is not.
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._num_calls = 0
        self._space = ""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        """See `OutputParser`."""
        self._held += text
        events: list[Event] = []
        while True:
            marker = _CLOSE if self._inside else _OPEN
            at = self._held.find(marker)
            if at < 0:
                break
            before, self._held = self._held[:at], self._held[at + len(marker) :]
            if self._inside:
                self._give_block(before, closed=True, events=events)
            else:
                self._give_content(before, events)
                self._space = ""
            self._inside = not self._inside
        if not self._inside:
            cut = len(self._held) - partial_match_length(self._held, _OPEN)
            free, self._held = self._held[:cut], self._held[cut:]
            self._give_content(free, events)
        return events

    def finish(self) -> list[Event]:
        """See `OutputParser`."""
        events: list[Event] = []
        if self._inside:
            self._give_block(self._held, closed=False, events=events)
        else:
            self._give_content(self._held, events)
            if self._space and self._num_calls == 0:
                events.append(Event("content", self._space))
        self._held = self._space = ""
        return events

    def _give_content(self, text: str, events: list[Event]) -> None:
        """Content; trailing white space waits until it is known what follows."""
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            events.append(Event("content", body))

    def _give_block(self, block: str, closed: bool, events: list[Event]) -> None:
        calls = _read_calls(block)
        if calls is None:
            text = _OPEN + block + (_CLOSE if closed else "")
            events.append(Event("content", text))
            return
        for name, arguments in calls:
            events.append(Event("tool_call", index=self._num_calls, name=name))
            events.append(Event("tool_arguments", arguments, index=self._num_calls))
            self._num_calls += 1


class ForcedToolParser:
    """The whole answer is calls: `[{"name":, "parameters":}]`, or the arguments of `name`."""

    def __init__(self, name: str | None = None) -> None:
        self._name = name
        self._text = ""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        """See `OutputParser`."""
        self._text += text
        return []

    def finish(self) -> list[Event]:
        """See `OutputParser`."""
        if self._name is not None:
            calls: list[tuple[str, str]] | None = [(self._name, self._text)]
        else:
            calls = _read_calls(self._text)
        if calls is None:  # cut off by max_tokens
            return [Event("content", self._text)]
        events = []
        for index, (name, arguments) in enumerate(calls):
            events.append(Event("tool_call", index=index, name=name))
            events.append(Event("tool_arguments", arguments, index=index))
        return events


def _read_calls(text: str) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON text) of each call in a JSON object or list; None: no calls."""
    for candidate in (text, html.unescape(text)):
        try:
            value = json.loads(candidate, strict=False)
        except (ValueError, RecursionError):
            continue
        entries = value if isinstance(value, list) else [value]
        calls = [_read_call(entry) for entry in entries]
        if calls and all(call is not None for call in calls):
            return [call for call in calls if call is not None]
    return None


def _read_call(entry: Any) -> tuple[str, str] | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return None
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):
        return entry["name"], arguments
    return entry["name"], json.dumps(arguments, ensure_ascii=False)


def forced_schema(tools: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    """The JSON schema of an answer that must be calls of `tools`, or the arguments of one."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if name is not None:
        return functions[name].get("parameters") or {"type": "object"}
    items = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function_name},
                "parameters": function.get("parameters") or {"type": "object"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for function_name, function in functions.items()
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": items}}
