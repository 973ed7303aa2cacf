# SPDX-License-Identifier: Apache-2.0
"""Runs the server: the engine core first, the HTTP stack beside it, and an orderly end.

SIGTERM or SIGINT: no new connections, open requests are finished, exit status 0; a second
signal ends them at once. A core that dies fails every open request with its reason, which is
also the last thing printed, and the exit status is not 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.engine.async_llm import AsyncLLM
from vllm.errors import EngineDeadError, ExitCode
from vllm.logger import init_logger

if TYPE_CHECKING:
    import uvicorn

    from vllm.config import VllmConfig
    from vllm.config.frontend import FrontendConfig

logger = init_logger(__name__)

_LAST_ANSWERS_S = 1.0
"""After the core's death: time for open requests to get their error."""


def run_server(vllm_config: VllmConfig, frontend: FrontendConfig, sock: socket.socket) -> int:
    """Serve on a bound socket until a signal; returns the exit status.

    Raises the `VLLMError` that the engine could not start with.
    """
    import uvloop

    try:
        uvloop.run(_Server(vllm_config, frontend, sock).run())
    except EngineDeadError as error:
        print(error, file=sys.stderr, flush=True)
        return ExitCode.CRASH
    return ExitCode.OK


class _Server:
    def __init__(
        self, vllm_config: VllmConfig, frontend: FrontendConfig, sock: socket.socket
    ) -> None:
        self._config = vllm_config
        self._frontend = frontend
        self._sock = sock
        self._death: Exception | None = None
        self._num_signals = 0
        self._uvicorn: uvicorn.Server | None = None
        self._starting: asyncio.Task[Any] | None = None
        self._engine = AsyncLLM(
            vllm_config, log_stats=not frontend.disable_log_stats, on_death=self._on_death
        )

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        # From here on the core imports and loads in its process while this one imports.
        self._engine.launch()
        try:
            server, model, metrics = await self._build()
            self._starting = asyncio.create_task(self._start_engine(model, metrics))
            self._starting.add_done_callback(self._on_started)
            if self._num_signals == 0:
                self._uvicorn = server
                await server.serve(sockets=[self._sock])
            self._starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._starting
        finally:
            await self._engine.shutdown()
        if self._death is not None:
            raise self._death

    async def _build(self) -> tuple[Any, Any, Any]:
        """Import and build the HTTP side."""
        import uvicorn

        from vllm.entrypoints.openai.app import build_app
        from vllm.entrypoints.openai.serving import ServedModel
        from vllm.metrics.prometheus import PrometheusMetrics
        from vllm.tokenizers import get_tokenizer

        config, frontend = self._config, self._frontend
        tokenizer = None
        if not config.model_config.skip_tokenizer_init:
            tokenizer = get_tokenizer(config.model_config)
            _use_given_template(tokenizer, frontend.chat_template)
        model = ServedModel(self._engine, config, frontend, tokenizer)
        metrics = PrometheusMetrics(config)
        keys = frontend.api_key or ([envs.VLLM_API_KEY] if envs.VLLM_API_KEY else [])
        settings = uvicorn.Config(
            build_app(model, metrics, keys),
            http="httptools",
            ws="none",
            lifespan="off",
            log_level=frontend.uvicorn_log_level,
            access_log=not frontend.disable_uvicorn_access_log,
            timeout_keep_alive=30,
        )
        return _http_server(settings), model, metrics

    async def _start_engine(self, model: Any, metrics: Any) -> None:
        if not self._frontend.disable_log_stats:
            from vllm.metrics.log import ThroughputLog

            log = ThroughputLog()

            def on_stats(scheduler: Any, iteration: Any) -> None:
                metrics.update(scheduler, iteration)
                log.update(scheduler, iteration)

            self._engine.on_stats = on_stats
        else:
            self._engine.on_stats = metrics.update
        await self._engine.start(model.tokenizer)
        model.ready = True
        host, port = self._sock.getsockname()[:2]
        logger.info("Serving %s on http://%s:%d", model.names[0], host, port)

    def _on_started(self, task: asyncio.Task[None]) -> None:
        """The engine is up, or it could not start: then the server ends with its reason."""
        if not task.cancelled() and task.exception() is not None:
            self._end(task.exception())

    def _on_death(self, error: Exception) -> None:
        logger.error("The engine died; ending")
        loop = asyncio.get_running_loop()
        loop.call_later(_LAST_ANSWERS_S, self._force)
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if isinstance(error, Exception) and self._death is None:
            self._death = error
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    def _force(self) -> None:
        if self._uvicorn is not None:
            self._uvicorn.force_exit = True

    def _on_signal(self, number: int) -> None:
        self._num_signals += 1
        name = signal.Signals(number).name
        if self._num_signals == 1:
            logger.info("%s: finishing %d open requests", name, self._engine.num_unfinished)
            self._end(None)
            return
        logger.info("%s again: ending now", name)
        self._engine.abort_all("the server was told to stop")
        asyncio.get_running_loop().call_later(0.2, self._force)


def _use_given_template(tokenizer: Any, given: str | None) -> None:
    """--chat-template in place of the model's own. Raises `ConfigError`."""
    if given is None:
        return
    import os

    from vllm.tokenizers.chat_template import ChatTemplate

    source = given
    if os.path.isfile(given):
        with open(given, encoding="utf-8") as file:
            source = file.read()
    tokenizer.chat_template = ChatTemplate(source, tokenizer.special_tokens)


def _http_server(settings: uvicorn.Config) -> uvicorn.Server:
    """uvicorn without its own signal handlers, which would end with the signal's status."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server(settings)
