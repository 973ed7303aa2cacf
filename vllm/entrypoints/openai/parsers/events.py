# SPDX-License-Identifier: Apache-2.0
"""What a parser gives, and the scanning that all of them share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol


@dataclasses.dataclass(frozen=True)
class Event:
    """A piece of the answer.

    "tool_call" opens call number `index` of function `name`; "tool_arguments" adds to the
    JSON text of its arguments.
    """

    kind: Literal["content", "reasoning", "tool_call", "tool_arguments"]
    text: str = ""
    index: int = 0
    name: str = ""


class OutputParser(Protocol):
    """Splits one sequence's answer."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        """Take what is new: its text, and the ids behind it."""

    def finish(self) -> list[Event]:
        """The answer has ended: give what was held back."""


def partial_match_length(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker` (and is not all of it)."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
