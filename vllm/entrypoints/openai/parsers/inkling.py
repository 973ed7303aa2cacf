# SPDX-License-Identifier: Apache-2.0
"""Inkling's answers: blocks between markers, which are tokens and not text.

The parser follows the token ids, so that a marker's spelling typed as text stays text, and
gives only as much text as it was fed: what a stop string cut off or holds back is not given.
"""

from __future__ import annotations

import html
import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from vllm.entrypoints.openai.parsers.events import Event
from vllm.tokenizers.detokenizer import Detokenizer
from vllm.tokenizers.inkling import marker_ids
from vllm.tokenizers.tokenizer import Tokenizer

_CONTENT_OPENERS = ("content_text", "content_invoke_tool_text", "content_tool_error")
_CLOSERS = ("end_message", "content_model_end_sampling")


class InklingParser:
    """One sequence's answer.

    The text it is fed must show special tokens. Without `split_reasoning` thinking is given as
    content, without `split_tools` calls are.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        split_reasoning: bool,
        split_tools: bool,
    ) -> None:
        ids = marker_ids(tokenizer)
        self._names = {token_id: name for name, token_id in ids.items()}
        self._tokenizer = tokenizer
        self._new_detokenizer: Callable[[], Detokenizer] = lambda: Detokenizer(
            tokenizer, skip_special_tokens=False
        )
        self._detokenizer = self._new_detokenizer()
        self._split_reasoning = split_reasoning
        self._split_tools = split_tools
        self._pieces: deque[tuple[str, str | None]] = deque()  # (text, marker's name or "")
        self._budget = 0  # characters of fed text that have not been given
        self._state = _state_after(prompt_token_ids, self._names)
        self._block = ""  # author or tool JSON, which are read when whole
        self._space = ""
        self._num_calls = 0
        self._spoken = False
        self._thinking = self._state == "reasoning"  # at the last id, not at the last text given
        self.num_reasoning_tokens = 0
        """Tokens between the thinking marker and what closes its block."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        """See `OutputParser`."""
        self._budget += len(text)
        for token_id in token_ids:
            name = self._names.get(token_id)
            if name is not None:
                self._thinking = name == "content_thinking"
            elif token_id in self._tokenizer.special_ids:
                name = ""  # never reaches a client
            if name is None:
                self.num_reasoning_tokens += self._thinking
                self._detokenizer.append([token_id])
                self._queue(self._detokenizer.take_delta(), None)
                continue
            self._end_characters()
            self._queue(self._tokenizer.token_text(token_id), name)
        return self._drain()

    def finish(self) -> list[Event]:
        """See `OutputParser`."""
        self._end_characters()
        events = self._drain()
        self._close(events)
        if self._space and not self._spoken and not self._num_calls:
            events.append(Event("content", self._space))  # it was all there is
        return events

    def _queue(self, text: str, name: str | None) -> None:
        if text or name is not None:
            self._pieces.append((text, name))

    def _end_characters(self) -> None:
        """Before a marker: half a character before it will not be completed."""
        self._detokenizer.finish()
        self._queue(self._detokenizer.take_delta(), None)
        self._detokenizer = self._new_detokenizer()

    def _drain(self) -> list[Event]:
        events: list[Event] = []
        while self._pieces:
            text, name = self._pieces[0]
            if name is not None:
                if len(text) > self._budget:
                    break
                self._marker(name, events)
            else:
                part = text[: self._budget]
                self._text(part, events)
                if len(part) < len(text):
                    self._pieces[0] = (text[len(part) :], None)
                    self._budget = 0
                    break
            self._pieces.popleft()
            self._budget -= len(text)
        return events

    def _marker(self, name: str, events: list[Event]) -> None:
        if name == "message_model":
            self._close(events)
            self._state = "header"
        elif name in _CONTENT_OPENERS or name in ("content_thinking", "content_invoke_tool_json"):
            self._block = "" if self._state == "header" else self._block  # the author's name
            if self._state != "header":
                self._close(events)
            self._state = _OPENED.get(name, "content")
            if self._state == "reasoning":
                self._space = ""
        elif name in _CLOSERS:
            self._close(events)

    def _text(self, text: str, events: list[Event]) -> None:
        if self._state in ("header", "tool"):
            self._block += text
        elif self._state == "reasoning" and self._split_reasoning:
            text = self._space + text
            body = text.rstrip()
            self._space = text[len(body) :]
            if body:
                events.append(Event("reasoning", body))
        else:
            self._content(text, events)

    def _content(self, text: str, events: list[Event]) -> None:
        """Content; white space waits until something follows that is no call."""
        if not self._spoken and not text.strip():
            self._space += text
            return
        if text:
            events.append(Event("content", self._space + text))
            self._space, self._spoken = "", True

    def _close(self, events: list[Event]) -> None:
        """The open block is whole."""
        block, self._block = self._block, ""
        if self._state == "tool":
            self._space = ""
            self._call(block, events)
        elif self._state == "header" and block:
            self._content(block, events)  # it was no author: no kind followed
        elif self._state == "reasoning":
            self._space = ""
        self._state = "content"

    def _call(self, block: str, events: list[Event]) -> None:
        read = _read_call(block) if self._split_tools else None
        if read is None:
            self._content(block, events)
            return
        events.append(Event("tool_call", index=self._num_calls, name=read[0]))
        events.append(Event("tool_arguments", read[1], index=self._num_calls))
        self._num_calls += 1


_OPENED = {"content_thinking": "reasoning", "content_invoke_tool_json": "tool"}


def _state_after(prompt_token_ids: Sequence[int], names: dict[int, str]) -> str:
    """What the prompt leaves open, by its last marker."""
    for token_id in reversed(prompt_token_ids):
        name = names.get(token_id)
        if name is not None:
            return "header" if name == "message_model" else _OPENED.get(name, "content")
    return "content"


def _read_call(block: str) -> tuple[str, str] | None:
    """(name, arguments as JSON text), or None if the block is no call.

    Models write `&quot;` for a quote and line ends in strings now and then: that is read where
    the block as it stands is no JSON.
    """
    unescaped = html.unescape(block)
    for candidate, decoder in (
        (block, _STRICT), (unescaped, _STRICT), (block, _LENIENT), (unescaped, _LENIENT),
    ):  # fmt: skip
        try:
            members = _members(candidate, decoder)
            name = members.get("name", (None, ""))[0]
            given = [members[key] for key in ("args", "arguments", "parameters") if key in members]
            arguments, written = given[0] if given else ({}, "{}")
            if not _is_name(name) or not isinstance(arguments, dict):
                return None
            return name, written if decoder is _STRICT else json.dumps(arguments, allow_nan=False)
        except (ValueError, RecursionError):
            continue
    return None


def _is_name(name: Any) -> TypeGuard[str]:
    """A name that can be sent: half a surrogate pair, written as an escape, cannot."""
    return isinstance(name, str) and not any("\ud800" <= char <= "\udfff" for char in name)


def _members(block: str, decoder: json.JSONDecoder) -> dict[str, tuple[Any, str]]:
    """Key to (value, its text) of a JSON object. Raises `ValueError` for anything else.

    Clients get the text as it stands: read and written again, 1e400 would be no JSON any more
    and half a surrogate pair no UTF-8.
    """
    text = block.strip(_WHITE)
    if not isinstance(decoder.decode(text), dict):
        raise ValueError("no object")
    members: dict[str, tuple[Any, str]] = {}
    at = _skip(text, 1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)  # over the colon
        value, at = decoder.raw_decode(text, start)
        members[key] = (value, text[start:at])
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return members


def _skip(text: str, at: int) -> int:
    while text[at] in _WHITE:
        at += 1
    return at


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_WHITE = " \t\n\r"
_STRICT = json.JSONDecoder(parse_constant=_refuse, parse_int=float)  # no limit on digits
_LENIENT = json.JSONDecoder(parse_constant=_refuse, strict=False)
