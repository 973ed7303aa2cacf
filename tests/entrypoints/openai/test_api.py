# SPDX-License-Identifier: Apache-2.0
"""The API through OpenAI's unmodified client."""

from __future__ import annotations

import concurrent.futures
import time
from typing import Any

import httpx
import openai
import pytest

from tests.entrypoints.openai.server_process import Server

PROMPT = "Once upon a time there was"
MESSAGES: list[Any] = [{"role": "user", "content": "count to ten"}]


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    """A greedy completion."""
    return client.completions.create(
        model="tiny", prompt=prompt, **{"temperature": 0, "max_tokens": 12, **options}
    )


def chat(client: openai.OpenAI, **options: Any) -> Any:
    """A greedy answer."""
    return client.chat.completions.create(
        model="tiny", messages=MESSAGES, **{"temperature": 0, "max_tokens": 12, **options}
    )


def test_a_completion_has_text_usage_and_a_reason_for_its_end(client: openai.OpenAI) -> None:
    answer = complete(client, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.model == "tiny"


def test_streamed_pieces_joined_are_the_whole_completion(client: openai.OpenAI) -> None:
    options = {"max_tokens": 40, "extra_body": {"ignore_eos": True}}
    whole = complete(client, **options)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}, **options))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 40
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"


def test_a_streamed_chat_begins_with_the_role_and_equals_the_whole_answer(
    client: openai.OpenAI,
) -> None:
    whole = chat(client)
    chunks = list(chat(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_chat_prompt_is_the_rendered_template(client: openai.OpenAI, server: Server) -> None:
    body = {"messages": MESSAGES}
    ids = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
    text = httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text == "<|im_start|>user\ncount to ten<|im_end|>\n<|im_start|>assistant\n"
    assert chat(client).usage.prompt_tokens == len(ids)


def test_several_prompts_and_n_are_numbered_prompt_by_prompt(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "def main():"]
    alone = [complete(client, p).choices[0].text for p in prompts]
    both = complete(client, prompts)
    assert [c.index for c in both.choices] == [0, 1]
    assert [c.text for c in both.choices] == alone
    sampled = complete(client, prompts, n=3, temperature=1.0, seed=7)
    assert [c.index for c in sampled.choices] == list(range(6))
    assert len({c.text for c in sampled.choices[:3]}) > 1


def test_the_same_seed_gives_the_same_text_whatever_else_runs(client: openai.OpenAI) -> None:
    def sample() -> str:
        return complete(client, temperature=1.0, seed=1234, max_tokens=20).choices[0].text

    first = sample()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        noise = [pool.submit(complete, client, "x" * n, temperature=1.0) for n in range(1, 8)]
        assert sample() == first
        for future in noise:
            future.result()
    assert complete(client, temperature=1.0, seed=1235, max_tokens=20).choices[0].text != first


def test_a_stop_string_ends_the_text_before_it_streamed_or_not(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=40, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[10:13]
    cut = text[: text.index(stop)]
    answer = complete(client, max_tokens=40, stop=[stop], extra_body={"ignore_eos": True})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (cut, "stop")
    assert answer.choices[0].stop_reason == stop
    options = {"max_tokens": 40, "stop": stop, "stream": True}
    chunks = complete(client, extra_body={"ignore_eos": True}, **options)
    assert "".join(c.choices[0].text for c in chunks) == cut
    kept = complete(
        client,
        max_tokens=40,
        stop=stop,
        extra_body={"ignore_eos": True, "include_stop_str_in_output": True},
    )
    assert kept.choices[0].text == cut + stop


def test_completion_logprobs_name_each_token_and_the_likeliest(client: openai.OpenAI) -> None:
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = complete(client, logprobs=3, extra_body=extra).choices[0]
    logprobs = choice.logprobs
    assert logprobs.tokens == [f"token_id:{i}" for i in choice.token_ids]
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(choice.token_ids)
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 3
        assert top[token] == value == max(top.values()) <= 0  # greedy


def test_chat_logprobs_carry_the_exact_bytes(client: openai.OpenAI) -> None:
    choice = chat(client, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True}).choices[0]
    entries = choice.logprobs.content
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    joined = b"".join(bytes(entry.bytes) for entry in entries)
    shown = chat(client, extra_body={"ignore_eos": True, "skip_special_tokens": False})
    assert joined.decode("utf-8", "replace") == shown.choices[0].message.content
    streamed = chat(
        client, logprobs=True, top_logprobs=2, stream=True, extra_body={"ignore_eos": True}
    )
    pieces = [c.choices[0].logprobs for c in streamed if c.choices]
    assert sum(len(p.content) for p in pieces if p) == len(entries)


def test_echo_puts_the_prompt_and_its_logprobs_first(client: openai.OpenAI) -> None:
    plain = complete(client)
    echoed = complete(client, echo=True, logprobs=1)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text
    logprobs = echoed.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.tokens) == plain.usage.total_tokens
    streamed = "".join(c.choices[0].text for c in complete(client, echo=True, stream=True))
    assert streamed == echoed.choices[0].text


def test_extra_sampling_fields_reach_the_sampler(client: openai.OpenAI) -> None:
    def ids(**extra: Any) -> list[int]:
        answer = complete(client, extra_body={"return_token_ids": True, **extra})
        return list(answer.choices[0].token_ids)

    greedy = ids(ignore_eos=True)
    assert set(ids(allowed_token_ids=[70, 71], ignore_eos=True)) <= {70, 71}
    assert greedy[0] not in ids(logit_bias={str(greedy[0]): -100}, ignore_eos=True)
    stopped = ids(stop_token_ids=[greedy[2]], ignore_eos=True)
    assert stopped == greedy[: greedy.index(greedy[2]) + 1]
    assert ids(top_k=1, temperature=1.5, ignore_eos=True) == greedy
    assert len(ids(min_tokens=12)) == 12


def test_a_json_schema_shapes_the_answer(client: openai.OpenAI) -> None:
    schema = {"enum": ["yes", "no"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = chat(client, response_format=form)
    assert answer.choices[0].message.content in ('"yes"', '"no"')
    assert answer.choices[0].finish_reason == "stop"
    choice = chat(client, extra_body={"guided_choice": ["red", "green"]})
    assert choice.choices[0].message.content in ("red", "green")


def test_a_forced_tool_choice_answers_with_a_call_of_that_tool(client: openai.OpenAI) -> None:
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {"ok": {"enum": ["a"]}},
        "required": ["ok"],
    }
    parameters["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    named = {"type": "function", "function": {"name": "f"}}
    for tool_choice in (named, "required"):
        options: dict[str, Any] = {"tools": tools, "tool_choice": tool_choice, "max_tokens": 200}
        choice = chat(client, **options).choices[0]
        call = choice.message.tool_calls[0]
        assert call.function.name == "f"
        assert httpx.Response(200, text=call.function.arguments).json() == {"ok": "a"}
        assert choice.finish_reason == "tool_calls"
        chunks = [c.choices[0] for c in chat(client, stream=True, **options)]
        calls = [d for c in chunks for d in c.delta.tool_calls or []]
        assert calls[0].function.name == "f"
        assert "".join(d.function.arguments for d in calls) == call.function.arguments
        assert chunks[-1].finish_reason == "tool_calls"


def test_models_are_listed_under_every_served_name(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny", "other-name"]
    assert client.models.retrieve("other-name").max_model_len == 512  # type: ignore[attr-defined]
    answer = client.completions.create(model="other-name", prompt="a", max_tokens=1)
    assert answer.model == "other-name"


def test_thirty_two_at_once_give_the_texts_of_one_alone(client: openai.OpenAI) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(32)]
    alone = [complete(client, p).choices[0].text for p in prompts[:4]]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda p: complete(client, p).choices[0].text, prompts))
    assert together[:4] == alone
    assert [c.text for c in complete(client, prompts).choices] == together


def test_a_client_that_goes_away_frees_its_request(server: Server) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 400, "ignore_eos": True, "n": 8}
    for stream in (True, False):
        request = {**body, "stream": stream, "temperature": 1.0}
        try:
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=request, timeout=0.3
            ) as response:
                next(response.iter_lines())
        except httpx.TimeoutException:
            assert not stream
        deadline = time.monotonic() + 5
        while server.metric("vllm:num_requests_running") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.metric("vllm:num_requests_running") == 0
        assert server.metric("vllm:num_requests_waiting") == 0
        assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_metrics_count_tokens_under_vllms_names(client: openai.OpenAI, server: Server) -> None:
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
    before = [server.metric(name) for name in names]
    answer = complete(client, max_tokens=7, extra_body={"ignore_eos": True})
    after = [server.metric(name) for name in names]
    assert after[0] - before[0] == 7
    assert after[1] - before[1] == answer.usage.prompt_tokens
    assert server.metric("vllm:time_to_first_token_seconds_count") > 0


def test_version_health_and_browsers_are_served(server: Server) -> None:
    import vllm

    assert httpx.get(f"{server.url}/version").json() == {"version": vllm.__version__}
    assert httpx.get(f"{server.url}/health").status_code == 200
    origin = {"Origin": "http://example.com"}
    answer = httpx.get(f"{server.url}/v1/models", headers=origin)
    assert answer.headers["access-control-allow-origin"] == "*"


def test_the_server_process_has_not_loaded_torch_or_transformers(server: Server) -> None:
    def mapped(pid: int) -> str:
        with open(f"/proc/{pid}/maps") as maps:
            return maps.read()

    assert "torch" not in mapped(server.process.pid)
    assert "torch" in mapped(server.core_pid())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_half_a_character_is_never_streamed(client: openai.OpenAI, path: str) -> None:
    # Token ids of the bytes of one character each, as likely as everything else together.
    ids = {str(i): 10.0 for i in range(3, 259)}
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 30}
    extra = {"logit_bias": ids, "ignore_eos": True}
    if path.endswith("chat/completions"):
        whole = chat(client, extra_body=extra, **options).choices[0].message.content
        chunks = chat(client, stream=True, extra_body=extra, **options)
        pieces = [c.choices[0].delta.content or "" for c in chunks]
    else:
        whole = complete(client, extra_body=extra, **options).choices[0].text
        pieces = [
            c.choices[0].text for c in complete(client, stream=True, extra_body=extra, **options)
        ]
    assert "".join(pieces) == whole
