# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: tokenizer files, chat templates, incremental detokenizing.

Torch-free: the API server lives on it. Imports `tokenizers` and jinja2, inside functions;
transformers only for a tokenizer that has no tokenizer.json. May import config and errors.
"""

from __future__ import annotations

from vllm.tokenizers.load import get_tokenizer
from vllm.tokenizers.tokenizer import Tokenizer

__all__ = ["Tokenizer", "get_tokenizer"]
