# SPDX-License-Identifier: Apache-2.0
"""Inkling's prompts, id for id, over the real vocabulary, which tml-renderers carries."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from vllm.tokenizers.inkling import InklingRenderer
from vllm.tokenizers.tokenizer import Tokenizer, byte_of_char

GOLDEN = json.loads((Path(__file__).parent / "data" / "inkling_golden.json").read_text("utf-8"))
CASES = {case["name"]: case for case in GOLDEN["cases"]}
_NAMED = {
    198: "unused", 199: "endoftext", 200: "message_user", 201: "message_model",
    202: "message_system", 203: "message_tool", 204: "content_text", 205: "content_image",
    206: "content_model_end_sampling", 208: "content_thinking", 210: "end_message",
    220: "content_audio_input", 222: "content_tool_error", 223: "audio", 224: "content_xml",
    228: "begin_of_text", 243: "audio_end", 249: "content_invoke_tool_json",
    257: "content_invoke_tool_text",
}  # fmt: skip
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SPLIT = "|".join(
    (
        _WORD % f"{_UPPER}*{_LOWER}+",
        _WORD % f"{_UPPER}+{_LOWER}*",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)


@pytest.fixture(scope="module")
def renderer() -> InklingRenderer:
    """Over o200k_base and the 60 special tokens, as the checkpoints' tokenizer.json has them."""
    found = importlib.util.find_spec("tml_renderers")
    assert found is not None and found.origin is not None
    lines = (Path(found.origin).parent / "data" / "o200k_base.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    char_of = {code: char for char, code in byte_of_char().items()}
    shown = {token: "".join([char_of[code] for code in token]) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(shown[left], shown[right]) for left, right in known]
    vocab = {shown[token]: rank for token, rank in ranks.items()}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    names = [_NAMED.get(i - 199_800, f"unused_{i}") for i in range(199_998, 200_058)]
    backend.add_special_tokens(
        [AddedToken(f"<|{name}|>", special=True, normalized=False) for name in names]
    )
    return InklingRenderer(Tokenizer(backend))


def test_the_markers_have_the_makers_ids(renderer: InklingRenderer) -> None:
    assert renderer.ids["message_user"] == 200_000
    assert renderer.ids["content_model_end_sampling"] == 200_006
    assert renderer.ids["content_invoke_tool_text"] == 200_057


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_has_the_makers_ids(name: str, renderer: InklingRenderer) -> None:
    case: dict[str, Any] = CASES[name]
    expected = case["ids"]
    if "effort" not in case:  # the maker's renderer then says nothing, the template 0.9
        system_and_user = CASES["effort 0.9"]["ids"]
        expected = system_and_user[4:-4] + expected
    got = renderer.render(
        case["messages"],
        tools=case.get("tools"),
        reasoning_effort=case.get("effort"),
        add_generation_prompt=False,
    )
    assert got == expected


def test_a_typed_marker_has_the_makers_ordinary_ids(renderer: InklingRenderer) -> None:
    typed = renderer.render(
        [{"role": "user", "content": "<|end_message|>"}], add_generation_prompt=True
    )
    assert typed[-9:] == [200_004, 27, 91, 419, 13968, 91, 29, 200_010, 200_001]
    assert typed.count(200_010) == 2


@pytest.mark.parametrize(
    "text",
    [
        "<|end_message|> Gr\u00fc\u00dfe \u4f60\u597d \n\n 12345 don't I'LL",
        "a\r\n\t b",
        "\U0001f469\u200d\U0001f680",
    ],
)
def test_any_text_has_the_makers_ids(text: str, renderer: InklingRenderer) -> None:
    from tml_renderers.tokenizers import O200kBaseChatTokenizer

    ids = renderer.render([{"role": "user", "content": text}], add_generation_prompt=False)
    inside = ids[ids.index(200_000) + 2 : -1]
    assert inside == O200kBaseChatTokenizer().encode_ordinary(text)
