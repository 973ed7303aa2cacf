# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from vllm.engine.input_processor import ProcessedRequest
from vllm.entrypoints.openai.http import SSE_DONE, sse
from vllm.entrypoints.openai.protocol import CompletionRequest
from vllm.entrypoints.openai.serving import (
    MAX_SEQUENCES,
    ServedModel,
    best_of_entry,
    check_stream_options,
    finite,
    new_id,
    num_completion_tokens,
    prompt_logprobs_of,
    token_label,
    usage_of,
)
from vllm.errors import RequestError
from vllm.outputs import CompletionOutput, RequestOutput, SampleLogprobs


class CompletionCall:
    """One request of this endpoint, with a sequence of outputs for each of its prompts."""

    def __init__(self, model: ServedModel, body: CompletionRequest, header: str | None) -> None:
        self.model = model
        self.body = body
        self.name = model.check_name(body.model)
        self.include_usage = check_stream_options(body)
        self.call_id = new_id("cmpl", body, header)
        self.created = int(time.time())
        if body.suffix:
            raise RequestError("suffix is not supported", "suffix")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise RequestError("best_of is not supported", "best_of")
        if body.echo and body.stream and body.logprobs is not None:
            raise RequestError("echo with logprobs cannot be streamed", "echo")
        self.requests: list[ProcessedRequest] = []

    async def prepare(self) -> None:
        """Tokenize and check every prompt. Raises `RequestError`."""
        prompts = _split_prompts(self.body.prompt)
        if len(prompts) > 1 and len(prompts) * (self.body.n or 1) > MAX_SEQUENCES:
            raise RequestError(
                f"{len(prompts)} prompts times n {self.body.n or 1} are more than {MAX_SEQUENCES}",
                "prompt",
            )
        for index, prompt in enumerate(prompts):
            self.requests.append(await self._prepare_one(index, prompt))

    async def _prepare_one(self, index: int, prompt: str | list[int]) -> ProcessedRequest:
        model, body = self.model, self.body
        processor = model.engine.input
        text, token_ids, _ = await model.in_thread(
            processor.tokenize, len(prompt), prompt, body.add_special_tokens
        )
        processor.check_tokens(token_ids)
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        if body.max_tokens is None:
            max_tokens = max(1, min(max_tokens, model.max_model_len - len(token_ids)))
        params = model.sampling_params(body, len(token_ids), max_tokens, body.logprobs)
        if body.echo and body.logprobs is not None:
            params = params.clone(prompt_logprobs=max(params.prompt_logprobs or 0, body.logprobs))
        request = processor.process(
            f"{self.call_id}-{index}",
            {"prompt": text, "prompt_token_ids": token_ids, "cache_salt": body.cache_salt},
            params,
            priority=body.priority,
        )
        model.log_request(request)
        return request

    async def full(self) -> dict[str, Any]:
        """The whole answer."""
        outputs = await asyncio.gather(*(self._last_output(r) for r in self.requests))
        n = self.body.n or 1
        choices = [
            self._choice(output, completion, at * n + completion.index)
            for at, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return {
            "id": self.call_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.name,
            "choices": choices,
            "usage": usage_of(
                sum(len(o.prompt_token_ids) for o in outputs),
                num_completion_tokens(outputs),
                sum(o.num_cached_tokens or 0 for o in outputs),
            ),
        }

    async def _last_output(self, request: ProcessedRequest) -> RequestOutput:
        async for output in self.model.engine.generate(request):
            last = output
        return last

    def _choice(
        self, output: RequestOutput, completion: CompletionOutput, index: int
    ) -> dict[str, Any]:
        text, logprobs = completion.text, None
        body = self.body
        token_ids, entries = completion.token_ids, completion.logprobs
        if body.echo:
            text = self._prompt_text(output) + text
            if body.logprobs is not None:
                token_ids = output.prompt_token_ids + token_ids
                entries = [*(e or {} for e in output.prompt_logprobs or []), *(entries or [])]
        if body.logprobs is not None and entries is not None:
            logprobs = self._logprobs(token_ids, entries, 0)
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_of(output.prompt_logprobs)
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    async def stream(self) -> AsyncIterator[bytes]:
        """Events; the prompts' streams are interleaved as they come."""
        merged = _merge([self.model.engine.generate(request) for request in self.requests])
        n, num_tokens, cached = self.body.n or 1, 0, [0] * len(self.requests)
        begun: set[int] = set()
        offsets: dict[int, int] = {}
        try:
            async for at, output in merged:
                cached[at] = output.num_cached_tokens or 0
                for completion in output.outputs:
                    index = at * n + completion.index
                    num_tokens += len(completion.token_ids)
                    text = completion.text
                    if self.body.echo and index not in begun:
                        text = self._prompt_text(output) + text
                    chunk = self._chunk(output, completion, index, text, offsets)
                    if index not in begun and self.body.return_token_ids:
                        chunk["choices"][0]["prompt_token_ids"] = output.prompt_token_ids
                    begun.add(index)
                    yield sse(chunk)
        finally:
            await merged.aclose()  # type: ignore[attr-defined]
        if self.include_usage:
            prompt_tokens = sum(len(r.prompt_token_ids) for r in self.requests)
            usage = usage_of(prompt_tokens, num_tokens, sum(cached))
            yield sse({**self._head(), "choices": [], "usage": usage})
        yield SSE_DONE

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.call_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.name,
        }

    def _chunk(
        self,
        output: RequestOutput,
        completion: CompletionOutput,
        index: int,
        text: str,
        offsets: dict[int, int],
    ) -> dict[str, Any]:
        logprobs = None
        if completion.logprobs is not None:
            offset = offsets.get(index, 0)
            logprobs = self._logprobs(completion.token_ids, completion.logprobs, offset)
            offsets[index] = offset + sum(map(len, logprobs["tokens"]))
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return {**self._head(), "choices": [choice]}

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        tokenizer = self.model.tokenizer
        return tokenizer.decode(output.prompt_token_ids) if tokenizer else ""

    def _logprobs(
        self, token_ids: list[int], entries: SampleLogprobs, offset: int
    ) -> dict[str, Any]:
        as_id, count = self.body.return_tokens_as_token_ids, self.body.logprobs or 0
        result: dict[str, Any] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        tokenizer = self.model.tokenizer
        for token_id, entry in zip(token_ids, entries, strict=False):
            chosen = entry.get(token_id)
            if chosen is None:  # the prompt's first token
                token = f"token_id:{token_id}" if as_id else ""
                if tokenizer is not None and not as_id:
                    token = tokenizer.token_text(token_id)
                best, logprob = None, None
            else:
                token, logprob = token_label(token_id, chosen, as_id), finite(chosen.logprob)
                ranked = best_of_entry(entry, count)
                best = {token_label(i, e, as_id): finite(e.logprob) for i, e in ranked}
                best.setdefault(token, logprob)
            result["text_offset"].append(offset)
            result["token_logprobs"].append(logprob)
            result["tokens"].append(token)
            result["top_logprobs"].append(best)
            offset += len(token)
        return result


def _split_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """A prompt is a string or ids; a list of those is several."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("the prompt is empty", "prompt")
    if all(type(item) is int for item in prompt):
        return [prompt]
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    if all(
        isinstance(item, list) and item and all(type(i) is int for i in item) for item in prompt
    ):
        return list(prompt)
    raise RequestError("prompt must be a string, token ids, or a list of one of these", "prompt")


async def _merge(
    streams: list[AsyncIterator[RequestOutput]],
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Items of several iterators as they come, with the number of their iterator."""
    if len(streams) == 1:
        try:
            async for output in streams[0]:
                yield 0, output
        finally:
            await streams[0].aclose()  # type: ignore[attr-defined]
        return
    waiting = {
        asyncio.ensure_future(anext(stream)): index  # type: ignore[arg-type]
        for index, stream in enumerate(streams)
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(streams[index]))] = index  # type: ignore[arg-type]
                yield index, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
