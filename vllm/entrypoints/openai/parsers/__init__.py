# SPDX-License-Identifier: Apache-2.0
"""Reads thinking and tool calls out of the model's answer, whole or streamed.

A parser takes the text as it comes, in pieces of any size, and gives events; the events of a
stream, joined, equal those of the whole text. No parser ever raises for what a model wrote.
"""

from __future__ import annotations

from vllm.entrypoints.openai.parsers.events import Event, OutputParser
from vllm.entrypoints.openai.parsers.registry import ParserNeeds, make_parser

__all__ = ["Event", "OutputParser", "ParserNeeds", "make_parser"]
