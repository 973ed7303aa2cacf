# SPDX-License-Identifier: Apache-2.0
"""Token ids to text while they arrive: whole characters only, and stop strings.

A token is a piece of bytes; a character may take several tokens. An incremental UTF-8 decoder
holds back what is not complete, so the streamed text equals the text decoded at the end. Each
token costs one table look-up and one decoder call, whatever came before.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from vllm.tokenizers.tokenizer import Tokenizer

_MAX_OPEN_CHARS = 512
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence, token by token.

    With stop strings, as many characters as a stop string could still need are kept from
    `take_delta` and `certain_text` until the sequence ends. Old text is moved out of the
    string that grows, so that a token's cost does not depend on the length.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._closed: list[str] = []
        self._open = ""
        self._untaken: list[str] = []  # closed text that take_delta has not given
        self._num_open_taken = 0
        self._stop = stop
        self._include_stop_str = include_stop_str
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._max_stop = max(map(len, stop), default=0)
        self._hold_back = 0 if include_stop_str or not stop else self._max_stop - 1
        self._step = _stepper(tokenizer, skip_special_tokens)

    def append(self, token_ids: Sequence[int]) -> tuple[int, str] | None:
        """Add tokens. Returns (tokens used, stop string) if a stop string ends the text."""
        for count, token_id in enumerate(token_ids, start=1):
            piece = self._step(token_id)
            self._num_tokens += 1
            if not piece:
                continue
            found = self._add(piece)
            if found is not None:
                return count, found
        return None

    def finish(self) -> str | None:
        """End the sequence: half a character becomes U+FFFD. Returns a stop string it made."""
        self._hold_back = 0
        piece = self._step(None)
        return self._add(piece) if piece else None

    @property
    def certain_text(self) -> str:
        """Everything that no stop string can take back."""
        end = max(0, len(self._open) - self._hold_back)
        return "".join([*self._closed, self._open[:end]])

    def take_delta(self) -> str:
        """The certain text since the last call."""
        end = len(self._open) - self._hold_back
        delta = ""
        if end > self._num_open_taken:
            delta = self._open[self._num_open_taken : end]
            self._num_open_taken = end
        if self._untaken:
            delta = "".join([*self._untaken, delta])
            self._untaken.clear()
        return delta

    def _add(self, piece: str) -> str | None:
        """Append text; the stop string that ends it, or None."""
        self._open += piece
        if self._stop and self._num_tokens > self._min_tokens:
            found = self._find_stop(len(piece))
            if found is not None:
                return found
        if len(self._open) > _MAX_OPEN_CHARS + self._max_stop:
            self._close(len(self._open) - self._max_stop)
        return None

    def _close(self, count: int) -> None:
        """Move the first `count` characters out of the string that grows."""
        part, self._open = self._open[:count], self._open[count:]
        self._closed.append(part)
        if self._num_open_taken < count:
            self._untaken.append(part[self._num_open_taken :])
        self._num_open_taken = max(0, self._num_open_taken - count)

    def _find_stop(self, num_new: int) -> str | None:
        """Cut the text at the first stop string that touches its last `num_new` characters."""
        text, first = self._open, None
        start = len(text)
        for stop in self._stop:
            at = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
            if 0 <= at < start:
                first, start = stop, at
        if first is None:
            return None
        self._hold_back = 0
        self._open = text[: start + len(first) if self._include_stop_str else start]
        return first


def _stepper(tokenizer: Tokenizer, skip_special_tokens: bool) -> Callable[[int | None], str]:
    """A function from the next id to the text it completes; None ends the sequence."""
    if tokenizer.style == "other":
        return _library_stepper(tokenizer, skip_special_tokens)
    table = tokenizer.token_bytes(skip_special_tokens)
    decode = _new_utf8_decoder("replace").decode

    def step(token_id: int | None) -> str:
        if token_id is None:
            return decode(b"", True)
        return decode(table[token_id])

    return step


def _library_stepper(
    tokenizer: Tokenizer, skip_special_tokens: bool
) -> Callable[[int | None], str]:
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=skip_special_tokens)
    held: list[int] = []

    def step(token_id: int | None) -> str:
        if token_id is None:
            return tokenizer.decode(held, skip_special_tokens) if held else ""
        piece = stream.step(tokenizer.backend, token_id)
        if piece is None:
            held.append(token_id)
            return ""
        held.clear()
        return piece

    return step
