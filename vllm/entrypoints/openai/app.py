# SPDX-License-Identifier: Apache-2.0
"""The routes of the server."""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

import vllm
from vllm.entrypoints.openai.http import (
    EventStream,
    HttpError,
    JsonResponse,
    as_http_error,
    guarded,
    read_body,
    run_unless_disconnected,
)
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from vllm.entrypoints.openai.serving import ServedModel
from vllm.entrypoints.openai.serving_chat import ChatCall, render_body
from vllm.entrypoints.openai.serving_completion import CompletionCall
from vllm.errors import RequestError
from vllm.metrics.prometheus import CONTENT_TYPE, PrometheusMetrics

Handler = Callable[[Request], Awaitable[Response]]


def build_app(model: ServedModel, metrics: PrometheusMetrics, api_keys: Sequence[str]) -> FastAPI:
    """The application: routes, keys, CORS, errors in OpenAI's form."""
    frontend = model.frontend
    app = FastAPI(title="vllm", version=vllm.__version__, root_path=frontend.root_path)
    handlers = _Handlers(model, metrics)
    for method, path, handler in (
        ("POST", "/v1/chat/completions", handlers.chat),
        ("POST", "/v1/completions", handlers.completions),
        ("GET", "/v1/models", handlers.models),
        ("GET", "/v1/models/{name:path}", handlers.one_model),
        ("POST", "/tokenize", handlers.tokenize),
        ("POST", "/detokenize", handlers.detokenize),
        ("GET", "/health", handlers.health),
        ("GET", "/ping", handlers.health),
        ("GET", "/version", handlers.version),
        ("GET", "/metrics", handlers.metrics_text),
        ("POST", "/reset_prefix_cache", handlers.reset_prefix_cache),
    ):
        app.add_route(path, _with_errors(handler), [method])
    app.add_exception_handler(HTTPException, _http_exception)
    if api_keys:
        app.add_middleware(_ApiKeys, keys=list(api_keys))
    app.add_middleware(
        CORSMiddleware,
        allow_origins=frontend.allowed_origins,
        allow_credentials=frontend.allow_credentials,
        allow_methods=frontend.allowed_methods,
        allow_headers=frontend.allowed_headers,
    )
    return app


def _with_errors(handler: Handler) -> Handler:
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            return as_http_error(error).response()

    return handle


async def _http_exception(request: Request, error: Exception) -> Response:
    """An unknown path or method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return HttpError(error.status_code, message).response()


class _ApiKeys:
    """Asks for a bearer token under /v1 and wherever else a request costs something."""

    _OPEN = ("/health", "/ping", "/version", "/metrics", "/docs", "/openapi.json")

    def __init__(self, app: Any, keys: list[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        error = HttpError(401, "the API key is missing or wrong", code="invalid_api_key")
        await error.response()(scope, receive, send)

    def _allowed(self, scope: Any) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in self._OPEN:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        # compare_digest: the time taken must not tell how much of a key was right.
        matches = [hmac.compare_digest(token.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


class _Handlers:
    def __init__(self, model: ServedModel, metrics: PrometheusMetrics) -> None:
        self._model = model
        self._metrics = metrics
        self._created = int(time.time())

    async def chat(self, request: Request) -> Response:
        self._model.check_ready()
        body = await read_body(request, ChatCompletionRequest, self._model.max_body_bytes)
        return await self._answer(request, ChatCall(self._model, body, _id_header(request)))

    async def completions(self, request: Request) -> Response:
        self._model.check_ready()
        body = await read_body(request, CompletionRequest, self._model.max_body_bytes)
        return await self._answer(request, CompletionCall(self._model, body, _id_header(request)))

    async def _answer(self, request: Request, call: ChatCall | CompletionCall) -> Response:
        await call.prepare()
        if not call.body.stream:
            return JsonResponse(await run_unless_disconnected(request, call.full()))
        chunks = call.stream()
        # The status is open until there is a first event: what the core refuses is still a 4xx.
        first = await run_unless_disconnected(request, _first(chunks))
        return EventStream(guarded(_after(first, chunks)))

    async def models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": list(map(self._card, self._model.names))})

    async def one_model(self, request: Request) -> Response:
        return JsonResponse(self._card(self._model.check_name(request.path_params["name"])))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self._model.config.model_config.model or name,
            "parent": None,
            "max_model_len": self._model.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        model = self._model
        model.check_ready()
        body = await read_body(request, TokenizeRequest, model.max_body_bytes)
        model.check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        if body.messages is not None:
            prompt, special = render_body(model, body, body.tools).as_prompt(), False
        else:
            prompt, special = body.prompt or "", True
        special = special if body.add_special_tokens is None else body.add_special_tokens
        tokenize = model.engine.input.tokenize
        _, ids, _ = await model.in_thread(tokenize, len(prompt), prompt, special)
        tokenizer = model.tokenizer
        strings = None
        if body.return_token_strs and tokenizer is not None:
            strings = [tokenizer.backend.id_to_token(i) for i in ids]
        return JsonResponse(
            {
                "count": len(ids),
                "max_model_len": model.max_model_len,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        model = self._model
        model.check_ready()
        body = await read_body(request, DetokenizeRequest, model.max_body_bytes)
        model.check_name(body.model)
        if model.tokenizer is None:
            raise RequestError("no tokenizer was loaded")
        if body.tokens:
            low, high = min(body.tokens), max(body.tokens)
            wrong = low if low < 0 else high
            if not 0 <= wrong < model.engine.input.vocab_size:
                raise RequestError(f"token id {wrong} is outside the vocabulary", "tokens")
        text = await model.in_thread(
            model.tokenizer.decode, 4 * len(body.tokens), body.tokens, False
        )
        return JsonResponse({"prompt": text})

    async def health(self, request: Request) -> Response:
        self._model.check_ready()
        reason = self._model.engine.client.unhealthy_reason()
        if reason is not None:
            raise HttpError(503, reason, code="engine-unhealthy")
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        return JsonResponse({"version": vllm.__version__})

    async def metrics_text(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def reset_prefix_cache(self, request: Request) -> Response:
        self._model.check_ready()
        await self._model.engine.client.reset_prefix_cache()
        return Response(status_code=200)


def _id_header(request: Request) -> str | None:
    value = request.headers.get("x-request-id")
    return value[:128] if value else None


async def _first(chunks: AsyncIterator[bytes]) -> bytes:
    try:
        return await anext(chunks)  # type: ignore[arg-type]
    except BaseException:
        await chunks.aclose()  # type: ignore[attr-defined]
        raise


async def _after(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for chunk in chunks:
            yield chunk
    finally:
        await chunks.aclose()  # type: ignore[attr-defined]
