# SPDX-License-Identifier: Apache-2.0
"""One model's tokenizer: encoding, decoding, and the bytes that each id stands for."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

    from vllm.tokenizers.chat_template import ChatTemplate

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPM_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class TokenBytes(dict[int, bytes]):
    """Token id to the bytes it adds to a text, filled as ids are met."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip = skip

    def __missing__(self, token_id: int) -> bytes:
        piece = b"" if token_id in self._skip else self._tokenizer.piece_bytes(token_id)
        self[token_id] = piece
        return piece


class Tokenizer:
    """A tokenizer of the `tokenizers` library with what the model's files say around it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.backend.no_padding()
        self.backend.no_truncation()
        self.chat_template = chat_template
        self.special_tokens = special_tokens or {}
        """Role to token, such as {"bos_token": "<s>"}."""
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.style = _decoder_style(json.loads(backend.to_str())["decoder"])
        """How ids become text: "byte-level", "spm", or "other" (only whole sequences)."""
        self._with_special = TokenBytes(self, frozenset())
        self._without_special = TokenBytes(self, self.special_ids)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def id_of(self, role: str) -> int | None:
        """Id of a special token by its role ("bos_token", "eos_token"), or None."""
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Special tokens written in it are recognised, as in transformers."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, skip_special_tokens: bool) -> TokenBytes:
        """The table of bytes by id."""
        return self._without_special if skip_special_tokens else self._with_special

    def decode_continuation(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text that `token_ids` add to a text before them; a leading space is kept."""
        if self.style == "other":
            return self.decode(token_ids, skip_special_tokens)
        table = self.token_bytes(skip_special_tokens)
        return b"".join([table[i] for i in token_ids]).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """One token's text, special tokens shown; half characters become U+FFFD."""
        return self._with_special[token_id].decode("utf-8", "replace")

    def piece_bytes(self, token_id: int) -> bytes:
        """The bytes behind an id; none for an id without a token."""
        token = self.backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self.style == "byte-level":
            table = byte_of_char()
            codes = [table.get(char) for char in token]
            if None in codes:  # an added token with a character outside the byte alphabet
                return token.encode()
            return bytes(c for c in codes if c is not None)
        if self.style == "spm":
            match = _BYTE_TOKEN.fullmatch(token)
            if match:
                return bytes([int(match[1], 16)])
            return token.replace("\u2581", " ").encode()
        return self.backend.decode([token_id], skip_special_tokens=False).encode()


@functools.cache
def byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: a printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = (b for b in range(256) if chr(b) not in table)
    table.update({chr(256 + n): b for n, b in enumerate(list(others))})
    return table


def _decoder_style(decoder: dict[str, Any] | None) -> str:
    parts = (decoder or {}).get("decoders", [decoder] if decoder else [])
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return "byte-level"
    if kinds and kinds <= _SPM_DECODERS and kinds & {"Replace", "Metaspace"}:
        return "spm"
    return "other"
