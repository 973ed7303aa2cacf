# SPDX-License-Identifier: Apache-2.0
"""Inkling's answers: blocks between markers, which are tokens and not text.

The parser follows the token ids, so that a marker's spelling typed as text stays text, and
gives only as much text as it was fed: what a stop string cut off or holds back is not given.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence

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

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        """See `OutputParser`."""
        self._budget += len(text)
        for token_id in token_ids:
            name = self._names.get(token_id)
            if name is None and token_id in self._tokenizer.special_ids:
                name = ""  # never reaches a client
            if name is None:
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
    """(name, arguments as JSON text), or None if the block is no call."""
    try:
        call = json.loads(block, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    given = [call[key] for key in ("args", "arguments", "parameters") if key in call]
    arguments = given[0] if given else {}
    if not isinstance(arguments, dict):
        return None
    return call["name"], json.dumps(arguments, ensure_ascii=False)
