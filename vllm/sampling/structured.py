# SPDX-License-Identifier: Apache-2.0
"""Structured output: a grammar that allows or forbids each next token (llguidance).

A constraint (JSON schema, regular expression, choice, Lark or GBNF grammar, any JSON object)
becomes a matcher over the tokenizer's vocabulary. Before a token is sampled the matcher
gives a mask with one bit a token, packed into int32 words; after that it is advanced.
llguidance never raises for what a user wrote: a matcher that cannot go on carries an error,
which here is a `RequestError` at compilation and a failed `accept` later.

No torch here: the front end checks constraints with `check_constraint` before it sends them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.errors import RequestError
from vllm.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from vllm.config import VllmConfig

# A model that may put any amount of white space between tokens of JSON can do so for ever.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\t]{1,32}"}
_MAX_MESSAGE_CHARS = 300
_PARAM = "structured_outputs"


def grammar_of(constraint: StructuredOutputsParams) -> str:
    """The constraint in llguidance's own form. Raises `RequestError`."""
    from llguidance import LLMatcher, grammar_from

    given = [name for name in constraint.__struct_fields__ if getattr(constraint, name) is not None]
    if len(given) != 1:
        found = ", ".join(given) or "none"
        raise RequestError(f"structured output takes exactly one constraint, got {found}", _PARAM)
    try:
        if constraint.json is not None:
            return LLMatcher.grammar_from_json_schema(constraint.json, defaults=JSON_OPTIONS)
        if constraint.regex is not None:
            return LLMatcher.grammar_from_regex(constraint.regex)
        if constraint.choice is not None:
            return LLMatcher.grammar_from_lark(_choice_rule(constraint.choice))
        if constraint.grammar is not None:
            return grammar_from("grammar", constraint.grammar)
    except (ValueError, TypeError) as error:
        raise RequestError(_message(given[0], str(error)), _PARAM) from None
    if not constraint.json_object:
        raise RequestError("json_object must be true or left out", _PARAM)
    return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=JSON_OPTIONS)


def check_constraint(constraint: StructuredOutputsParams) -> None:
    """Refuse a constraint that no tokenizer could serve. Raises `RequestError`."""
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar_of(constraint))
    if failed:
        raise RequestError(_message(_kind(constraint), messages[0]), _PARAM)


def _choice_rule(choice: list[str]) -> str:
    if not choice or any(not isinstance(c, str) or not c for c in choice):
        raise ValueError("it must hold at least one string, and none may be empty")
    return "start: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choice)


def _kind(constraint: StructuredOutputsParams) -> str:
    fields = constraint.__struct_fields__
    return next(name for name in fields if getattr(constraint, name) is not None)


def _message(kind: str, reason: str) -> str:
    reason = " ".join(reason.split())
    if len(reason) > _MAX_MESSAGE_CHARS:
        reason = reason[:_MAX_MESSAGE_CHARS] + "..."
    return f"the {kind} constraint cannot be used: {reason}"


class TokenGrammar:
    """One request's constraint and how far its text has come."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._row_bytes = (vocab_size + 31) // 32 * 4

    def accept(self, token_ids: list[int]) -> bool:
        """Advance by sampled tokens; False if one is forbidden or a limit was hit."""
        return self._matcher.consume_tokens(token_ids)

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of these tokens, from the first, could follow."""
        return self._matcher.validate_tokens(token_ids) if token_ids else 0

    def bitmask_rows(self, draft_token_ids: list[int]) -> bytes:
        """Masks of the next token and of the one after each draft, ceil(vocab / 32) words each.

        The drafts must be allowed (`num_allowed`). A matcher in error gives a mask with the
        end of text alone; the next `accept` then ends the request.
        """
        matcher, size = self._matcher, self._row_bytes
        rows = [matcher.compute_bitmask()[:size]]
        for consumed, token in enumerate(draft_token_ids, start=1):
            if not matcher.consume_token(token):
                raise AssertionError(f"draft {consumed} ({token}) was not checked")
            rows.append(matcher.compute_bitmask()[:size])
        if draft_token_ids:
            matcher.rollback(len(draft_token_ids))
        return b"".join(rows)

    @property
    def terminated(self) -> bool:
        """Whether nothing but the end of text may follow."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str:
        """Why the matcher cannot go on; empty if it can."""
        return _message("structured output", self._matcher.get_error())


class GrammarCompiler:
    """Makes grammars over one tokenizer; callable from several threads.

    `load_tokenizer` returns the vocabulary as a tokenizers JSON text; it is called
    with the first constraint, since most servers never see one.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], str],
        vocab_size: int,
        eos_token_ids: list[int],
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()

    def __call__(self, constraint: StructuredOutputsParams) -> TokenGrammar:
        """Compile a constraint. Raises `RequestError` with the library's reason."""
        from llguidance import LLMatcher

        grammar = grammar_of(constraint)
        matcher = LLMatcher(self._tokenizer_now(), grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(_message(_kind(constraint), matcher.get_error()), _PARAM)
        return TokenGrammar(matcher, self._vocab_size)

    def _tokenizer_now(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                text, eos = self._load_tokenizer(), self._eos_token_ids or None
                try:
                    self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos)
                except ValueError:
                    # A tokenizer with more ids than the model samples; the rows are cut.
                    self._tokenizer = LLTokenizer(text, eos_token=eos)
            return self._tokenizer


def make_grammar_compiler(vllm_config: VllmConfig) -> GrammarCompiler | None:
    """The compiler for a served model; None without a tokenizer."""
    model_config = vllm_config.model_config
    if model_config.skip_tokenizer_init:
        return None

    def load_tokenizer() -> str:
        from vllm.tokenizers import get_tokenizer

        return get_tokenizer(model_config).backend.to_str()

    return GrammarCompiler(
        load_tokenizer, model_config.shape.sampled_vocab_size, list(model_config.eos_token_ids)
    )
