# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from vllm.engine.input_processor import ProcessedRequest
from vllm.entrypoints.chat import RenderedChat, render_chat
from vllm.entrypoints.openai.http import SSE_DONE, sse
from vllm.entrypoints.openai.parsers import Event, OutputParser, ParserNeeds, make_parser
from vllm.entrypoints.openai.parsers.inkling import InklingParser
from vllm.entrypoints.openai.parsers.inkling_grammar import framed
from vllm.entrypoints.openai.parsers.tools import forced_schema
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.serving import (
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
from vllm.outputs import CompletionOutput
from vllm.sampling_params import StructuredOutputsParams

_MAX_TEMPLATE_KEYS = 64


class ChatCall:
    """One request of this endpoint."""

    request: ProcessedRequest

    def __init__(self, model: ServedModel, body: ChatCompletionRequest, header: str | None) -> None:
        self.model = model
        self.body = body
        self.name = model.check_name(body.model)
        self.include_usage = check_stream_options(body)
        self.call_id = new_id("chatcmpl", body, header)
        self.created = int(time.time())
        self.role = model.frontend.response_role
        self._check_fields()
        self.needs = self._parser_needs()
        self.logprobs = (body.top_logprobs or 0) if body.logprobs else None
        self._echo = ""
        self._num_reasoning_tokens: int | None = None

    def _check_fields(self) -> None:
        body = self.body
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        if body.chat_template is not None:
            raise RequestError(
                "templates are taken from the server only (--chat-template)", "chat_template"
            )
        if len(body.chat_template_kwargs or {}) > _MAX_TEMPLATE_KEYS:
            raise RequestError("chat_template_kwargs has too many keys", "chat_template_kwargs")

    def _parser_needs(self) -> ParserNeeds:
        """How the answer is read. Raises `RequestError` for a tool choice that cannot be."""
        body, frontend = self.body, self.model.frontend
        reasoning = self.model.config.structured_outputs_config.reasoning_parser
        inkling = self.model.inkling
        names = [_tool_name(tool, at) for at, tool in enumerate(body.tools or [])]
        choice = body.tool_choice
        if choice is None:
            choice = "auto" if names and frontend.enable_auto_tool_choice else "none"
        if choice == "none" or not names:
            if choice not in ("none", "auto"):
                raise RequestError("tool_choice needs tools", "tool_choice")
            return ParserNeeds(reasoning, inkling=inkling)
        if choice == "auto":
            if not frontend.enable_auto_tool_choice or not frontend.tool_call_parser:
                raise RequestError(
                    "tool_choice auto needs a server started with --enable-auto-tool-choice and "
                    "--tool-call-parser",
                    "tool_choice",
                )
            return ParserNeeds(reasoning, frontend.tool_call_parser, inkling=inkling)
        # Inkling's calls are tokens that no text grammar reaches: the model is trusted.
        trusted = ParserNeeds(reasoning, "inkling", inkling=True) if inkling else None
        if choice == "required":
            return trusted or ParserNeeds(reasoning, force_tools=True)
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            raise RequestError("tool_choice names no function of tools", "tool_choice")
        return trusted or ParserNeeds(reasoning, forced_tool=name, force_tools=True)

    async def prepare(self) -> None:
        """Render, tokenize, check. Raises `RequestError`."""
        model, body = self.model, self.body
        processor = model.engine.input
        rendered = render_body(model, body, self.body.tools if self._shows_tools() else None)
        prompt = rendered.as_prompt()
        text, token_ids, _ = await model.in_thread(
            processor.tokenize, len(prompt), prompt, body.add_special_tokens
        )
        processor.check_tokens(token_ids)
        limit = (
            body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        )
        params = model.sampling_params(body, len(token_ids), limit, self.logprobs)
        if self.needs.inkling:
            params = params.clone(skip_special_tokens=False)
            if params.structured_outputs is not None:
                constraint = await asyncio.to_thread(framed, params.structured_outputs)
                params = params.clone(structured_outputs=constraint)
        if self.needs.force_tools:
            if params.structured_outputs is not None:
                raise RequestError("a forced tool choice takes no other constraint", "tool_choice")
            schema = forced_schema(body.tools or [], self.needs.forced_tool)
            params = params.clone(structured_outputs=StructuredOutputsParams(json=schema))
        self.request = processor.process(
            self.call_id,
            {"prompt": text, "prompt_token_ids": token_ids, "cache_salt": body.cache_salt},
            params,
            priority=body.priority,
        )
        model.log_request(self.request)
        if body.echo:
            last = body.messages[-1].get("content")
            self._echo = last if isinstance(last, str) else ""

    def _shows_tools(self) -> bool:
        return bool(self.body.tools) and self.body.tool_choice != "none"

    def _parser(self) -> OutputParser | None:
        request = self.request
        tokenizer = self.model.tokenizer
        return make_parser(self.needs, request.prompt or "", request.prompt_token_ids, tokenizer)

    def _shown(self, events: list[Event]) -> list[Event]:
        if self.body.include_reasoning:
            return events
        return [event for event in events if event.kind != "reasoning"]

    async def full(self) -> dict[str, Any]:
        """The whole answer."""
        async for item in self.model.engine.generate(self.request):
            output = item
        result = {
            **self._head("chat.completion"),
            "choices": [self._choice(completion) for completion in output.outputs],
            "usage": usage_of(
                len(output.prompt_token_ids),
                num_completion_tokens([output]),
                output.num_cached_tokens,
                self._num_reasoning_tokens,
            ),
            "prompt_logprobs": prompt_logprobs_of(output.prompt_logprobs),
        }
        if self.body.return_token_ids:
            result["prompt_token_ids"] = output.prompt_token_ids
        return result

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        parser = self._parser()
        message: dict[str, Any] = {"role": self.role, "content": self._echo + completion.text}
        if parser is not None:
            events = parser.feed(completion.text, completion.token_ids) + parser.finish()
            self._count_reasoning(parser)
            message = {"role": self.role, **_message_of(self._shown(events))}
        choice = {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion),
            "finish_reason": _finish_reason(completion, bool(message.get("tool_calls"))),
            "stop_reason": completion.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    async def stream(self) -> AsyncIterator[bytes]:
        """Events: the role first, then deltas, the reason for the end, and perhaps the usage."""
        head = self._head("chat.completion.chunk")
        generating = self.model.engine.generate(self.request)
        parsers: dict[int, OutputParser | None] = {}
        with_calls: set[int] = set()
        num_tokens, cached = 0, 0
        try:
            async for output in generating:
                cached = output.num_cached_tokens or 0
                for completion in output.outputs:
                    index = completion.index
                    num_tokens += len(completion.token_ids)
                    if index not in parsers:
                        parsers[index] = self._parser()
                        yield sse({**head, "choices": [self._first_choice(index)]})
                    deltas = self._deltas(parsers[index], completion)
                    if any("tool_calls" in delta for delta in deltas):
                        with_calls.add(index)
                    for choice in self._chunk_choices(completion, deltas, index in with_calls):
                        yield sse({**head, "choices": [choice]})
        finally:
            await generating.aclose()  # type: ignore[attr-defined]
        if self.include_usage:
            num_prompt_tokens = len(self.request.prompt_token_ids)
            usage = usage_of(num_prompt_tokens, num_tokens, cached, self._num_reasoning_tokens)
            yield sse({**head, "choices": [], "usage": usage})
        yield SSE_DONE

    def _deltas(
        self, parser: OutputParser | None, completion: CompletionOutput
    ) -> list[dict[str, Any]]:
        if parser is None:
            return [{"content": completion.text}] if completion.text else []
        events = parser.feed(completion.text, completion.token_ids)
        if completion.finish_reason is not None:
            events += parser.finish()
            self._count_reasoning(parser)
        return [_delta_of(event) for event in self._shown(events)]

    def _count_reasoning(self, parser: OutputParser) -> None:
        """Add the thinking of a sequence that has ended, where its parser counts it."""
        if isinstance(parser, InklingParser):
            before = self._num_reasoning_tokens or 0
            self._num_reasoning_tokens = before + parser.num_reasoning_tokens

    def _first_choice(self, index: int) -> dict[str, Any]:
        delta = {"role": self.role, "content": self._echo}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chunk_choices(
        self, completion: CompletionOutput, deltas: list[dict[str, Any]], has_calls: bool
    ) -> list[dict[str, Any]]:
        """A choice for each delta; the reason for the end goes with the last."""
        ended = completion.finish_reason is not None
        logprobs = self._logprobs(completion)
        if not deltas and (ended or logprobs is not None or self.body.return_token_ids):
            deltas = [{}]
        choices: list[dict[str, Any]] = [
            {"index": completion.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas
        ]
        if choices:
            choices[0]["logprobs"] = logprobs
            if self.body.return_token_ids:
                choices[0]["token_ids"] = completion.token_ids
            if ended:
                choices[-1]["finish_reason"] = _finish_reason(completion, has_calls)
                choices[-1]["stop_reason"] = completion.stop_reason
        return choices

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.call_id,
            "object": kind,
            "created": self.created,
            "model": self.name,
        }

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        as_id, count = self.body.return_tokens_as_token_ids, self.logprobs or 0
        content = []
        for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=False):
            shown = [(token_id, entry[token_id]), *best_of_entry(entry, count)]
            items = [
                {
                    "token": token_label(i, e, as_id),
                    "logprob": finite(e.logprob),
                    "bytes": list(self.model.token_bytes(i)),
                }
                for i, e in shown
            ]
            content.append({**items[0], "top_logprobs": items[1:]})
        return {"content": content}


def render_body(model: ServedModel, body: Any, tools: list[dict[str, Any]] | None) -> RenderedChat:
    """The prompt of a request with `messages`. Raises `RequestError`."""
    variables = dict(body.chat_template_kwargs or {})
    if getattr(body, "reasoning_effort", None) is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    reserved = {"messages", "tools", "template", "add_generation_prompt", "continue_final_message"}
    taken = sorted(reserved & set(variables))
    if taken:
        raise RequestError(f"chat_template_kwargs must not set {taken[0]}", "chat_template_kwargs")
    return render_chat(
        model.tokenizer,
        model.config.model_config,
        body.messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        **variables,
    )


def _tool_name(tool: Any, at: int) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f"tools[{at}] has no function with a name", "tools")
    return name


def _delta_of(event: Event) -> dict[str, Any]:
    if event.kind == "content":
        return {"content": event.text}
    if event.kind == "reasoning":
        return {"reasoning": event.text, "reasoning_content": event.text}
    if event.kind == "tool_call":
        function = {"name": event.name, "arguments": ""}
        call = {"index": event.index, "id": _call_id(), "type": "function", "function": function}
        return {"tool_calls": [call]}
    arguments = {"arguments": event.text}
    return {"tool_calls": [{"index": event.index, "function": arguments}]}


def _message_of(events: list[Event]) -> dict[str, Any]:
    content = "".join(e.text for e in events if e.kind == "content")
    reasoning = "".join(e.text for e in events if e.kind == "reasoning")
    calls = [
        {
            "id": _call_id(),
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": "".join(
                    e.text for e in events if e.kind == "tool_arguments" and e.index == call.index
                ),
            },
        }
        for call in events
        if call.kind == "tool_call"
    ]
    message: dict[str, Any] = {"content": content if content or not (calls or reasoning) else None}
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = calls
    return message


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def _finish_reason(completion: CompletionOutput, has_calls: bool) -> str | None:
    if has_calls and completion.finish_reason == "stop":
        return "tool_calls"
    return completion.finish_reason
