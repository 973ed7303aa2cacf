# SPDX-License-Identifier: Apache-2.0
"""Find a model's tokenizer: a GGUF file's metadata, tokenizer.json, or transformers at last."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm.config.model_files import read_json_object
from vllm.errors import ConfigError, Diagnostic
from vllm.tokenizers.chat_template import ChatTemplate
from vllm.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

    from vllm.config import ModelConfig

_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))


def get_tokenizer(model_config: ModelConfig) -> Tokenizer:
    """The tokenizer of a model, its chat template included. Raises `ConfigError`."""
    path = model_config.tokenizer_path
    if path.endswith(".gguf"):
        from vllm.tokenizers.gguf import load_gguf_tokenizer

        return load_gguf_tokenizer(path)
    return load_tokenizer(path, trust_remote_code=model_config.trust_remote_code)


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer in a directory. Raises `ConfigError` saying what is missing or broken.

    As in transformers 5, tokenizer.json's own post-processor says which special tokens a text
    gets; `add_bos_token` in tokenizer_config.json does not overrule it.
    """
    config = _optional_json(path, "tokenizer_config.json")
    if os.path.exists(os.path.join(path, "tokenizer.json")):
        backend = _read_backend(os.path.join(path, "tokenizer.json"))
    else:
        backend = _convert(path, trust_remote_code)
    special = _special_tokens(path, config)
    _add_configured_tokens(backend, config, special)
    source = find_chat_template(path, config)
    template = None if source is None else ChatTemplate(source, special)
    return Tokenizer(backend, chat_template=template, special_tokens=special)


def wrap_with(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `encode` put these tokens around every text; None: no token there."""
    from tokenizers.processors import TemplateProcessing

    single = " ".join(filter(None, (bos and f"{bos}:0", "$A:0", eos and f"{eos}:0")))
    ids = [(token, backend.token_to_id(token)) for token in (bos, eos) if token]
    backend.post_processor = TemplateProcessing(single=single, special_tokens=ids)


def find_chat_template(path: str, config: dict[str, Any]) -> str | None:
    """The template's source: its own file first, then tokenizer_config.json."""
    file = os.path.join(path, "chat_template.jinja")
    if os.path.exists(file):
        with open(file, encoding="utf-8") as handle:
            return handle.read()
    found = _optional_json(path, "chat_template.json").get("chat_template")
    found = found or config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {t["name"]: t["template"] for t in found if "name" in t and "template" in t}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _optional_json(path: str, name: str) -> dict[str, Any]:
    file = os.path.join(path, name)
    return read_json_object(file) if os.path.exists(file) else {}


def _special_tokens(path: str, config: dict[str, Any]) -> dict[str, str]:
    """Role to token; tokenizer_config.json wins over special_tokens_map.json."""
    found = {}
    for source in (_optional_json(path, "special_tokens_map.json"), config):
        for role in _ROLES:
            value = source.get(role)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[role] = value
    return found


def _add_configured_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str]
) -> None:
    """Tokens that only tokenizer_config.json names, or whose special mark it changes."""
    from tokenizers import AddedToken

    known = backend.get_added_tokens_decoder()
    entries = config.get("added_tokens_decoder")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for key, entry in sorted((entries or {}).items(), key=lambda item: int(item[0])):
        present = known.get(int(key))
        if present is not None and present.special == bool(entry.get("special")):
            continue
        options = {flag: bool(entry[flag]) for flag in flags if flag in entry}
        backend.add_tokens([AddedToken(entry["content"], **options)])
    marked = {token.content for token in known.values() if token.special}
    unmarked = [token for token in special.values() if token not in marked]
    missing = [token for token in unmarked if backend.token_to_id(token) is not None]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in missing])


def _read_backend(file: str) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        with open(file, "rb") as handle:
            return tokenizers.Tokenizer.from_buffer(handle.read())
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            Diagnostic(
                "tokenizer-broken",
                "tokenizer.json cannot be read",
                why=str(error)[:200],
                where=file,
                fix="restore it from the model's repository",
            )
        ) from None


def _convert(path: str, trust_remote_code: bool) -> tokenizers.Tokenizer:
    """Let transformers convert another format (sentencepiece, tiktoken). Slow to import."""
    names = ("tokenizer.model", "vocab.json", "tokenizer_config.json", "vocab.txt", "tekken.json")
    why = "there is neither tokenizer.json nor another known format"
    if any(os.path.exists(os.path.join(path, name)) for name in names):
        try:
            from transformers import AutoTokenizer

            auto = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
            return auto.backend_tokenizer
        except Exception as error:  # whatever a foreign format or repository code raises
            why = " ".join(str(error).split())[:200]
    raise ConfigError(
        Diagnostic(
            "tokenizer-missing",
            "the model has no tokenizer that can be read",
            why=why,
            where=path,
            fix="add tokenizer.json, name another with --tokenizer, or --skip-tokenizer-init",
        )
    )
