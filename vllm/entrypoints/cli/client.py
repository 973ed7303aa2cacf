# SPDX-License-Identifier: Apache-2.0
"""What `vllm chat` and `vllm complete` share: a model behind a URL, or one in this process."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from vllm.engine.arg_utils import FlexibleArgumentParser
from vllm.errors import Diagnostic, ExitCode, ResourceError

DEFAULT_URL = "http://localhost:8000/v1"


class TextModel(Protocol):
    """Something that answers."""

    def chat(self, messages: list[dict[str, str]], max_tokens: int | None) -> Iterator[str]:
        """The answer to a conversation, in pieces."""

    def complete(self, prompt: str, max_tokens: int | None) -> Iterator[str]:
        """The continuation of a text, in pieces."""


def client_parser(prog: str, description: str) -> FlexibleArgumentParser:
    """The flags that both commands have."""
    parser = FlexibleArgumentParser(prog=prog, description=description)
    parser.add_argument("--url", default=DEFAULT_URL, help=f"server (default: {DEFAULT_URL})")
    parser.add_argument("--model-name", default=None, help="served name (default: the first one)")
    parser.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), help="the server's key"
    )
    parser.add_argument("--max-tokens", type=int, default=None, help="longest answer")
    parser.add_argument(
        "--model", default=None, nargs="?", const="", metavar="MODEL",
        help="load this model here in place of asking a server; without a value the embedded one",
    )  # fmt: skip
    return parser


@contextlib.contextmanager
def connect(args: argparse.Namespace) -> Iterator[TextModel]:
    """The model that the flags name."""
    if args.model is not None:
        model = LocalModel(args.model)
        try:
            yield model
        finally:
            model.close()
    else:
        yield ServedModel(args.url, args.api_key, args.model_name)


def read_lines(quick: str | None, label: str) -> Iterator[str]:
    """One text, or standard input line by line; prompts where somebody types."""
    if quick is not None:
        yield quick
        return
    prompt = f"{label}> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        if line.strip():
            yield line


class Conversation:
    """What was said so far."""

    def __init__(self, system_prompt: str | None) -> None:
        self.messages: list[dict[str, str]] = []
        if system_prompt:
            self.messages.append({"role": "system", "content": system_prompt})

    def ask(self, model: TextModel, text: str, max_tokens: int | None) -> None:
        """Print the answer as it comes."""
        self.messages.append({"role": "user", "content": text})
        pieces = []
        for piece in model.chat(self.messages, max_tokens):
            print(piece, end="", flush=True)
            pieces.append(piece)
        print()
        self.messages.append({"role": "assistant", "content": "".join(pieces)})


class ServedModel:
    """A model behind an OpenAI-compatible URL."""

    def __init__(self, url: str, api_key: str | None, name: str | None) -> None:
        import openai

        self._openai = openai
        self._url = url
        self._client = openai.OpenAI(base_url=url, api_key=api_key or "none", max_retries=0)
        self._name = name or self._ask(lambda: self._client.models.list().data[0].id)

    def chat(self, messages: Any, max_tokens: int | None) -> Iterator[str]:
        """The answer in pieces."""
        options: Any = {} if max_tokens is None else {"max_tokens": max_tokens}
        stream = self._ask(
            lambda: self._client.chat.completions.create(
                model=self._name, messages=messages, stream=True, **options
            )
        )
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content

    def complete(self, prompt: str, max_tokens: int | None) -> Iterator[str]:
        """The continuation in pieces."""
        options: Any = {} if max_tokens is None else {"max_tokens": max_tokens}
        stream = self._ask(
            lambda: self._client.completions.create(
                model=self._name, prompt=prompt, stream=True, **options
            )
        )
        for chunk in stream:
            if chunk.choices:
                yield chunk.choices[0].text

    def _ask(self, call: Any) -> Any:
        try:
            return call()
        except self._openai.APIConnectionError:
            code, why = "server-unreachable", "nothing answers there"
            fix = "start vllm serve, correct --url, or load a model here with --model"
        except self._openai.APIStatusError as error:
            code, why = "server-refused", str(error.message)
            fix = "see the server's answer above"
        raise ResourceError(
            Diagnostic(code, f"the server at {self._url} cannot answer", why=why, fix=fix,
                       exit_code=ExitCode.RESOURCE)
        )  # fmt: skip


class LocalModel:
    """A model loaded in this process; answers come whole."""

    def __init__(self, model: str) -> None:
        from vllm import LLM

        self._llm = LLM(model)

    def _params(self, max_tokens: int | None) -> Any:
        limit = max_tokens or 512
        return self._llm.get_default_sampling_params().clone(max_tokens=limit)

    def chat(self, messages: list[dict[str, str]], max_tokens: int | None) -> Iterator[str]:
        """The answer."""
        (answer,) = self._llm.chat(
            [dict(m) for m in messages], self._params(max_tokens), use_tqdm=False
        )
        yield answer.outputs[0].text

    def complete(self, prompt: str, max_tokens: int | None) -> Iterator[str]:
        """The continuation."""
        (answer,) = self._llm.generate(prompt, self._params(max_tokens), use_tqdm=False)
        yield answer.outputs[0].text

    def close(self) -> None:
        """Give the memory back."""
        self._llm.shutdown()
