# SPDX-License-Identifier: Apache-2.0
"""The HTTP edge: bodies in, JSON and event streams out, errors in OpenAI's form.

Messages to clients are short, whatever the client sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vllm.engine.output_processor import RequestFailed
from vllm.errors import EngineDeadError, RequestError
from vllm.logger import init_logger

logger = init_logger(__name__)

T = TypeVar("T")
encode_json = msgspec.json.Encoder().encode
_MAX_MESSAGE_CHARS = 1000
_KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_PATH = re.compile(r" - at `\$\.?([^`]*)`")


class HttpError(Exception):
    """An answer that is an error; `code` may be more exact than the status."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = status if code is None else code

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        message = self.message
        if len(message) > _MAX_MESSAGE_CHARS:
            message = message[:_MAX_MESSAGE_CHARS] + " ..."
        kind = _KINDS.get(self.status, "APIError")
        error = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """The whole answer."""
        headers = {"Retry-After": "1"} if self.status == 503 else None
        if self.status == 401:
            headers = {"WWW-Authenticate": "Bearer"}
        return JsonResponse(self.body(), self.status, headers)


class JsonResponse(Response):
    """A JSON answer encoded by msgspec, which never writes NaN or infinity."""

    media_type = "application/json"

    def __init__(
        self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(encode_json(content), status_code, headers)


def as_http_error(error: BaseException) -> HttpError:
    """What a client is told about an exception; a defect of ours is logged."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestError):
        return HttpError(400, error.message, error.param, error.code)
    if isinstance(error, EngineDeadError):
        return HttpError(503, str(error), code="engine-dead")
    if isinstance(error, RequestFailed):
        return HttpError(500, str(error), code="request-failed")
    logger.error("a request failed", exc_info=error)
    return HttpError(500, f"internal error: {type(error).__name__}")


async def read_body(request: Request, kind: type[T], max_bytes: int) -> T:
    """The body as a struct. Raises `HttpError` 400, 413 or 415."""
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json":
        shown = media[:60] or "nothing"
        raise HttpError(415, f"the body must be application/json, Content-Type says {shown}")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(int(declared), max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(len(body), max_bytes)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        path = _PATH.search(text)
        param = re.split(r"[\[.]", path[1])[0] if path else None
        missing = re.search(r"required field `(\w+)`", text)
        raise HttpError(400, text[:300], missing[1] if missing else param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body is no JSON: {str(error)[:200]}") from None


def _too_large(size: int, limit: int) -> HttpError:
    return HttpError(413, f"the body has {size:,} bytes or more, at most {limit:,} are taken")


class EventStream(Response):
    """Server-sent events out of an iterator of encoded chunks.

    When the client goes away the iterator is closed, which aborts its request.
    """

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self.status_code = 200
        self.background = None
        self.init_headers({"content-type": "text/event-stream; charset=utf-8"})
        self.raw_headers.append((b"cache-control", b"no-cache"))
        # The length is not known.
        self.raw_headers = [h for h in self.raw_headers if h[0] != b"content-length"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        sender = asyncio.ensure_future(self._send_all(send))
        await _race(sender, receive)

    async def _send_all(self, send: Callable[[Any], Awaitable[None]]) -> None:
        chunks = self._chunks
        try:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]


async def run_unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; if the client goes away first, cancel it and raise 499."""
    task = asyncio.ensure_future(work)
    if not await _race(task, request.receive):
        raise HttpError(499, "the client closed the connection")
    return task.result()


async def _race(task: asyncio.Future[Any], receive: Callable[[], Awaitable[Any]]) -> bool:
    """Wait for `task`, cancelling it when the client disconnects; whether it was done."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        finished = task.done()
        if finished:
            task.result()
        return finished
    finally:
        for future in (task, watcher):
            if not future.done():
                future.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await future


def sse(content: Any) -> bytes:
    """One event."""
    return b"data: " + encode_json(content) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"


async def guarded(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A stream that tells an error as its last event instead of breaking off."""
    try:
        async for chunk in chunks:
            yield chunk
    except Exception as error:
        yield sse(as_http_error(error).body())
        yield SSE_DONE
    finally:
        await chunks.aclose()  # type: ignore[attr-defined]
