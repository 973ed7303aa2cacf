# SPDX-License-Identifier: Apache-2.0
"""Text while it arrives equals text at the end, for every text, split and stop string."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.tiny_models import tiny_checkpoint
from tests.tokenizers.test_load import smollm2
from vllm.tokenizers.detokenizer import Detokenizer
from vllm.tokenizers.load import load_tokenizer
from vllm.tokenizers.tokenizer import Tokenizer

TINY = load_tokenizer(str(tiny_checkpoint("llama")))
ID_OF_BYTE = {TINY.piece_bytes(i)[0]: i for i in range(512) if len(TINY.piece_bytes(i)) == 1}


def stream(tokenizer: Tokenizer, ids: list[int], **options: object) -> tuple[list[str], str | None]:
    """Deltas of a sequence fed token by token, and the stop string that ended it."""
    detokenizer = Detokenizer(tokenizer, **options)  # type: ignore[arg-type]
    deltas = []
    for token_id in ids:
        hit = detokenizer.append([token_id])
        deltas.append(detokenizer.take_delta())
        if hit is not None:
            return deltas, hit[1]
    late = detokenizer.finish()
    deltas.append(detokenizer.take_delta())
    assert "".join(deltas) == detokenizer.certain_text
    return deltas, late


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 511), max_size=60))
def test_streamed_text_equals_the_whole_text_for_any_ids(ids: list[int]) -> None:
    deltas, _ = stream(TINY, ids)
    assert "".join(deltas) == TINY.decode_continuation(ids, True)
    assert "".join(deltas) == TINY.decode(ids, True)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40))
def test_no_delta_ends_inside_a_character(text: str) -> None:
    deltas, _ = stream(TINY, TINY.encode(text, add_special_tokens=False), skip_special_tokens=False)
    assert "".join(deltas) == text
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


def expected_cut(text: str, stop: list[str], include: bool) -> str:
    """The text up to the stop string that is complete first (brute force)."""
    for end in range(1, len(text) + 1):
        hits = [end - len(s) for s in stop if text[:end].endswith(s)]
        if hits:
            return text[:end] if include else text[: min(hits)]
    return text


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="ab\u00e9\u4f60\U0001f600", max_size=30),
    st.lists(st.text(alphabet="ab\u00e9\u4f60\U0001f600", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_stop_strings_across_tokens_cut_where_the_first_one_is_complete(
    text: str, stop: list[str], include: bool
) -> None:
    ids = [ID_OF_BYTE[b] for b in text.encode()]  # one byte a token: every split happens
    deltas, hit = stream(TINY, ids, stop=stop, include_stop_str=include)
    assert "".join(deltas) == expected_cut(text, stop, include)
    assert (hit is not None) == any(s in text for s in stop)


def test_a_held_back_beginning_of_a_stop_string_is_given_at_the_end() -> None:
    ids = TINY.encode("one STO", add_special_tokens=False)
    deltas, hit = stream(TINY, ids, stop=["STOP"])
    assert hit is None
    assert "".join(deltas) == "one STO"
    assert "STO" not in "".join(deltas[:-1])


def test_stop_strings_are_looked_for_only_after_min_tokens() -> None:
    ids = TINY.encode("xxxxxxxx", add_special_tokens=False)
    _, hit = stream(TINY, ids, stop=["x"], min_tokens=len(ids))
    assert hit is None
    deltas, hit = stream(TINY, ids, stop=["x"], min_tokens=len(ids) - 1)
    assert hit == "x"


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    ids = smollm2().encode("\U0001f9ff", add_special_tokens=False)
    assert len(ids) > 1
    deltas, _ = stream(smollm2(), ids[:-1])
    assert "".join(deltas[:-1]) == ""
    assert deltas[-1] == "\ufffd"


def test_a_wordpiece_decoder_streams_what_the_library_decodes() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    vocab = {"[UNK]": 0, "he": 1, "##llo": 2, "world": 3, "!": 4}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert tokenizer.style == "other"
    deltas, _ = stream(tokenizer, [1, 2, 3, 4])
    assert "".join(deltas) == tokenizer.decode([1, 2, 3, 4]) == "hello world!"


@pytest.mark.parametrize("stop", [[], ["never in the text"]])
def test_a_token_costs_the_same_after_a_hundred_thousand_as_at_first(stop: list[str]) -> None:
    ids = TINY.encode("the quick brown fox ", add_special_tokens=False) * 2000

    def seconds(detokenizer: Detokenizer) -> float:
        started = time.process_time()
        for token_id in ids:
            detokenizer.append([token_id])
        return time.process_time() - started

    detokenizer = Detokenizer(TINY, stop=stop)
    first = seconds(detokenizer)
    for _ in range(3):
        seconds(detokenizer)
    assert seconds(detokenizer) < 3 * first + 0.05
