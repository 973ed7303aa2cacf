# SPDX-License-Identifier: Apache-2.0
"""A tokenizer out of a GGUF file's metadata.

`tokenizer.ggml.model` gives the kind: "gpt2" is byte-level BPE whose way of splitting text
`tokenizer.ggml.pre` names; "llama" is sentencepiece BPE, whose merges follow from the scores.
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING, Any

from vllm.errors import ConfigError, Diagnostic
from vllm.tokenizers.chat_template import ChatTemplate
from vllm.tokenizers.load import wrap_with
from vllm.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TAIL = r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = _WORDS % (_SUFFIX, _SUFFIX) + _TAIL % r"\p{N}{1,3}"
_TEKKEN = _WORDS % ("", "") + _TAIL % r"\p{N}"

# name -> (split pattern, every digit alone, a known piece is never split, NFC first)
_PRE_TYPES: dict[str, tuple[str, bool, bool, bool]] = {
    "default": (_GPT2, False, False, False),
    "gpt-2": (_GPT2, False, False, False),
    "smollm": (_GPT2, True, False, False),
    "starcoder": (_GPT2, True, False, False),
    "refact": (_GPT2, True, False, False),
    "command-r": (_GPT2, True, False, False),
    "llama-bpe": (_LLAMA3, False, True, False),
    "llama3": (_LLAMA3, False, True, False),
    "smaug-bpe": (_LLAMA3, False, False, False),
    "qwen2": (_QWEN2, False, False, True),
    "deepseek-r1-qwen": (_QWEN2, False, False, True),
    "gpt-4o": (_O200K, False, True, False),
    "tekken": (_TEKKEN, False, True, False),
}


def read_metadata(path: str) -> dict[str, Any]:
    """Every key of a GGUF file (its header was checked by the configuration)."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (num_keys,) = struct.unpack_from("<Q", data, 16)
        cursor = _Cursor(data, 24)
        return {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_keys)}


class _Cursor:
    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data, self.position = data, position

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        start = self.position + 8
        self.position = start + self.scalar("Q")
        return self.data[start : self.position].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, length = self.scalar("I"), self.scalar("Q")
        if item == _STRING:
            return [self.string() for _ in range(length)]
        if item == _ARRAY:
            return [self.value(_ARRAY) for _ in range(length)]
        layout = struct.Struct(f"<{length}{_SCALARS[item]}")
        values = list(layout.unpack_from(self.data, self.position))
        self.position += layout.size
        return values


def load_gguf_tokenizer(path: str) -> Tokenizer:
    """The tokenizer in a GGUF file. Raises `ConfigError` for a kind that is not known."""
    metadata = {
        key.removeprefix("tokenizer."): value
        for key, value in read_metadata(path).items()
        if key.startswith("tokenizer.")
    }
    tokens = metadata.get("ggml.tokens")
    kind = metadata.get("ggml.model")
    if problem := vocabulary_problem(kind, metadata.get("ggml.pre", "default"), bool(tokens), path):
        raise ConfigError(problem)
    assert tokens
    try:
        make = _byte_level if kind == "gpt2" else _sentencepiece
        backend = make(tokens, metadata)
    except Exception as error:  # the library raises bare Exception
        why = " ".join(str(error).split())[:200]
        raise ConfigError(_problem("the vocabulary cannot be used", why, path)) from None
    _add_special(backend, tokens, metadata.get("ggml.token_type") or [])
    special = _special_tokens(tokens, metadata)
    add_bos = metadata.get("ggml.add_bos_token", kind == "llama")
    add_eos = metadata.get("ggml.add_eos_token", False)
    bos, eos = special.get("bos_token"), special.get("eos_token")
    wrap_with(backend, bos if add_bos else None, eos if add_eos else None)
    source = metadata.get("chat_template")
    template = ChatTemplate(source, special) if source else None
    return Tokenizer(backend, chat_template=template, special_tokens=special)


def vocabulary_problem(kind: Any, pre: Any, has_tokens: bool, path: str) -> Diagnostic | None:
    """What keeps the vocabulary that a file's metadata describes from being used; None: nothing.

    `kind` is `tokenizer.ggml.model`, `pre` is `tokenizer.ggml.pre`.
    """
    if not has_tokens:
        return _problem("the file holds no vocabulary", "tokenizer.ggml.tokens is absent", path)
    if kind not in ("gpt2", "llama"):
        return _problem(f"tokenizer.ggml.model {kind!r} is not known", "known: gpt2, llama", path)
    if kind == "gpt2" and pre not in tuple(_PRE_TYPES):
        why = f"known: {', '.join(_PRE_TYPES)}"
        return _problem(f"tokenizer.ggml.pre {pre!r} is not known", why, path)
    return None


def _problem(subject: str, why: str, path: str) -> Diagnostic:
    return Diagnostic(
        "gguf-tokenizer",
        subject,
        why=why,
        where=path,
        fix="name a directory with tokenizer.json by --tokenizer",
    )


def _byte_level(tokens: list[str], metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pattern, digits_alone, ignore_merges, nfc = _PRE_TYPES[metadata.get("ggml.pre", "default")]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("ggml.merges", [])]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits_alone else []
    steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(tokens: list[str], metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    scores = metadata.get("ggml.scores") or [0.0] * len(tokens)
    unknown = metadata.get("ggml.unknown_token_id")
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback="<0x00>" in vocab,
        )
    )
    prefix = metadata.get("ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("\u2581")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece, best score first: sentencepiece merges in that order."""
    found = []
    for piece, token_id in vocab.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in vocab and right in vocab:
                found.append((-scores[token_id], token_id, vocab[left], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_special(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    for number, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind == number
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)


def _special_tokens(tokens: list[str], metadata: dict[str, Any]) -> dict[str, str]:
    found = {}
    names = ("bos", "bos"), ("eos", "eos"), ("eot", "eot"), ("unk", "unknown"), ("pad", "padding")
    for role, key in names:
        token_id = metadata.get(f"ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            found[f"{role}_token"] = tokens[token_id]
    return found
