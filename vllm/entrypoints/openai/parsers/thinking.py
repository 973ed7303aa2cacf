# SPDX-License-Identifier: Apache-2.0
"""Thinking between <think> and </think>, as Qwen3 and DeepSeek-R1 write it."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.entrypoints.openai.parsers.events import Event, OutputParser, partial_match_length

_OPEN, _CLOSE = "<think>", "</think>"


class ThinkParser:
    """Gives thinking as reasoning and hands the rest to `then` (tool calls), if there is one.

    `thinking` tells the state that the prompt left: inside the block or before it.
    """

    def __init__(self, thinking: bool, then: OutputParser | None = None) -> None:
        self._state = "opened" if thinking else "start"
        self._held = ""
        self._then = then
        self._content_begun = False

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        """See `OutputParser`."""
        self._held += text
        events: list[Event] = []
        if self._state in ("start", "opened"):
            self._leave_start()
        if self._state == "thinking":
            self._read_thinking(events)
        if self._state == "content":
            self._give_content(events, token_ids)
        return events

    def finish(self) -> list[Event]:
        """See `OutputParser`."""
        events: list[Event] = []
        if self._held:
            if self._state in ("opened", "thinking"):
                events.append(Event("reasoning", self._held))
                self._held = ""
            else:
                self._state = "content"
                self._give_content(events, ())
        return events + (self._then.finish() if self._then else [])

    def _leave_start(self) -> None:
        """Whether the answer opens the block (again), once enough of it is there to tell."""
        stripped = self._held.lstrip()
        if stripped.startswith(_OPEN):
            self._held = stripped[len(_OPEN) :]
            self._state = "thinking"
        elif not _OPEN.startswith(stripped):
            self._state = "thinking" if self._state == "opened" else "content"

    def _read_thinking(self, events: list[Event]) -> None:
        at = self._held.find(_CLOSE)
        if at >= 0:
            thought, self._held = self._held[:at], self._held[at + len(_CLOSE) :]
            self._state = "content"
        else:
            cut = len(self._held) - partial_match_length(self._held, _CLOSE)
            thought, self._held = self._held[:cut], self._held[cut:]
        if thought:
            events.append(Event("reasoning", thought))

    def _give_content(self, events: list[Event], token_ids: Sequence[int]) -> None:
        text = self._held
        if not self._content_begun:  # the empty lines after the block are layout
            text = text.lstrip("\n")
        self._held = ""
        if not text:
            return
        self._content_begun = True
        if self._then is not None:
            events += self._then.feed(text, token_ids)
        else:
            events.append(Event("content", text))


def prompt_leaves_thinking_open(prompt: str) -> bool:
    """Whether the prompt ends inside a thinking block."""
    return prompt.rfind(_OPEN) > prompt.rfind(_CLOSE) and prompt.rstrip().endswith(_OPEN)


def prompt_closed_thinking(prompt: str) -> bool:
    """Whether the prompt ends with a closed block: thinking is switched off."""
    return prompt.rstrip().endswith(_CLOSE)
