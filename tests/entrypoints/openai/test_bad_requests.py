# SPDX-License-Identifier: Apache-2.0
"""Whatever a client sends: a 4xx with a short reason, and nobody else notices."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.entrypoints.openai.server_process import Server

JSON_TYPE = {"content-type": "application/json"}
OK: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
CHAT: dict[str, Any] = {"model": "tiny", "max_tokens": 4}
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}

# name -> (fields of a completion, status, the field to blame)
COMPLETIONS: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "unknown model": ({"model": "gpt-9"}, 404, "model"),
    "empty prompt": ({"prompt": ""}, 400, "prompt"),
    "empty list": ({"prompt": []}, 400, "prompt"),
    "prompt of objects": ({"prompt": [{}]}, 400, "prompt"),
    "prompt longer than the context": ({"prompt": "hello " * 3000}, 400, "prompt"),
    "prompt as long as the context": ({"prompt": [70] * 512}, 400, "prompt"),
    "max_tokens 0": ({"max_tokens": 0}, 400, "max_tokens"),
    "max_tokens negative": ({"max_tokens": -1}, 400, "max_tokens"),
    "max_tokens beyond the context": ({"max_tokens": 512}, 400, "max_tokens"),
    "max_tokens of the wrong type": ({"max_tokens": "many"}, 400, "max_tokens"),
    "temperature negative": ({"temperature": -0.1}, 400, "temperature"),
    "temperature huge": ({"temperature": 1e300}, 400, "temperature"),
    "top_p 0": ({"top_p": 0}, 400, "top_p"),
    "top_p 2": ({"top_p": 2}, 400, "top_p"),
    "top_k -2": ({"top_k": -2}, 400, "top_k"),
    "min_p 2": ({"min_p": 2}, 400, "min_p"),
    "n 0": ({"n": 0}, 400, "n"),
    "n 10,000": ({"n": 10_000, "temperature": 1}, 400, "n"),
    "prompts times n": ({"prompt": ["a"] * 100, "n": 100}, 400, "prompt"),
    "logprobs 1000": ({"logprobs": 1000}, 400, "logprobs"),
    "prompt_logprobs 1000": ({"prompt_logprobs": 1000}, 400, "prompt_logprobs"),
    "token id out of the vocabulary": ({"prompt": [5, 512]}, 400, "prompt"),
    "token id negative": ({"prompt": [5, -1]}, 400, "prompt"),
    "stop of 100 strings": ({"stop": ["x"] * 100}, 400, "stop"),
    "stop empty": ({"stop": [""]}, 400, "stop"),
    "stop token out of the vocabulary": ({"stop_token_ids": [512]}, 400, "stop_token_ids"),
    "bias out of the vocabulary": ({"logit_bias": {"512": 1}}, 400, "logit_bias"),
    "bias of a word": ({"logit_bias": {"word": 1}}, 400, "logit_bias"),
    "allowed ids empty": ({"allowed_token_ids": []}, 400, "allowed_token_ids"),
    "min_tokens above max_tokens": ({"min_tokens": 9}, 400, "min_tokens"),
    "seed too large": ({"seed": 2**63}, 400, "seed"),
    "repetition_penalty 0": ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    "stream options without stream": ({"stream_options": {}}, 400, "stream_options"),
    "regex that is none": ({"guided_regex": "("}, 400, None),
    "schema that is none": ({"guided_json": {"type": "no-such-type"}}, 400, None),
    "two constraints": ({"guided_regex": "a", "guided_choice": ["a"]}, 400, "structured_outputs"),
    "response_format unknown": ({"response_format": {"type": "?"}}, 400, "response_format"),
    "suffix": ({"suffix": "x"}, 400, "suffix"),
}
CHATS: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "no messages": ({"messages": []}, 400, "messages"),
    "messages missing": ({}, 400, "messages"),
    "unknown role": ({"messages": [{"role": "wizard", "content": "hi"}]}, 400, "messages"),
    "no content": ({"messages": [{"role": "user"}]}, 400, "messages"),
    "a message that is none": ({"messages": ["hi"]}, 400, "messages"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "messages",
    ),
    "audio": (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        400,
        "messages",
    ),
    "top_logprobs alone": ({"messages": [USER], "top_logprobs": 2}, 400, "top_logprobs"),
    "top_logprobs 1000": (
        {"messages": [USER], "logprobs": True, "top_logprobs": 1000},
        400,
        "logprobs",
    ),
    "tool choice without tools": ({"messages": [USER], "tool_choice": "auto"}, 0, None),
    "tool choice auto on this server": (
        {"messages": [USER], "tools": [TOOL], "tool_choice": "auto"},
        400,
        "tool_choice",
    ),
    "tool without a name": ({"messages": [USER], "tools": [{}]}, 400, "tools"),
    "a template of one's own": ({"messages": [USER], "chat_template": "x"}, 400, "chat_template"),
    "a reserved template variable": (
        {"messages": [USER], "chat_template_kwargs": {"messages": []}},
        400,
        "chat_template_kwargs",
    ),
    "continuing and beginning": (
        {"messages": [USER], "continue_final_message": True},
        400,
        "continue_final_message",
    ),
}
del CHATS["tool choice without tools"]  # the server may ignore it


def check_error(response: httpx.Response, status: int, param: str | None = None) -> None:
    """The answer is OpenAI's error object, short, and blames the right field."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and len(response.content) < 2000
    assert "Traceback" not in error["message"]
    if param is not None:
        assert error["param"] == param, error


@pytest.fixture
def canary(server: Server) -> Any:
    """Before and after: the same request gives the same answer."""

    def ask() -> Any:
        return httpx.post(f"{server.url}/v1/completions", json=OK).json()["choices"]

    before = ask()
    yield
    assert ask() == before


@pytest.mark.parametrize("stream", [False, True])
def test_every_bad_completion_is_refused_with_its_reason(
    server: Server, canary: None, stream: bool
) -> None:
    for name, (fields, status, param) in COMPLETIONS.items():
        if stream and "stream_options" in fields:
            continue
        body = {**OK, **fields, "stream": stream}
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=20)
        assert response.status_code == status, (name, response.text)
        check_error(response, status, param)


def test_every_bad_chat_is_refused_with_its_reason(server: Server, canary: None) -> None:
    for name, (fields, status, param) in CHATS.items():
        response = httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, **fields})
        assert response.status_code == status, (name, response.text)
        check_error(response, status, param)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'{"prompt": "a", "temperature": Infinity}', 400),
        (b'{"prompt": "\xff"}', 400),
        (b"[" * 100_000, 400),
        (json.dumps({"prompt": "x" * 10_000_000}).encode(), 413),
    ],
    ids=["brace", "nothing", "list", "null", "nan", "infinity", "latin-1", "deep", "10 MB"],
)
def test_a_body_that_is_no_request_is_refused(
    server: Server, canary: None, content: bytes, status: int
) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        response = httpx.post(f"{server.url}{path}", content=content, headers=JSON_TYPE)
        check_error(response, status)


def test_a_chunked_body_without_a_length_is_cut_off_too(server: Server, canary: None) -> None:
    chunks = (b"x" * 65536 for _ in range(200))
    try:
        response = httpx.post(f"{server.url}/v1/completions", content=chunks, headers=JSON_TYPE)
    except httpx.WriteError:
        return  # refused while it was still sending
    check_error(response, 413)


def test_wrong_content_type_path_and_method_are_told(server: Server, canary: None) -> None:
    url = f"{server.url}/v1/completions"
    check_error(httpx.post(url, content=b"prompt=a", headers={"content-type": "text/plain"}), 415)
    check_error(httpx.post(url, data={"prompt": "a"}), 415)
    check_error(httpx.get(url), 405)
    check_error(httpx.post(f"{server.url}/v1/nothing"), 404)
    check_error(httpx.get(f"{server.url}/v1/models/other"), 404, "model")


def test_detokenizing_ids_outside_the_vocabulary_is_refused(server: Server) -> None:
    for tokens in ([512], [-1], [2**40]):
        response = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens})
        check_error(response, 400, "tokens")


def test_prompts_up_to_the_limit_run_and_one_more_does_not(server: Server, canary: None) -> None:
    url = f"{server.url}/v1/completions"
    fits = {**OK, "prompt": [70] * 511, "max_tokens": 1, "ignore_eos": True}
    assert httpx.post(url, json=fits, timeout=30).json()["usage"]["total_tokens"] == 512
    check_error(httpx.post(url, json={**fits, "prompt": [70] * 512}), 400, "prompt")


_FIELDS = sorted({name for fields, *_ in COMPLETIONS.values() for name in fields} - {"model"})
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-3, 600), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=4))
def test_no_combination_of_fields_is_answered_with_a_server_error(
    server: Server, canary: None, fields: dict[str, Any]
) -> None:
    body = {**OK, **fields, "stream": False}
    content = json.dumps(body).encode()
    response = httpx.post(
        f"{server.url}/v1/completions", content=content, headers=JSON_TYPE, timeout=30
    )
    assert response.status_code in (200, 400), (fields, response.text)
    assert len(response.content) < 8000 or response.status_code == 200
