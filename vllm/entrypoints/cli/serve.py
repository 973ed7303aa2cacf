# SPDX-License-Identifier: Apache-2.0
"""`vllm serve MODEL`: checks, port, then the engine and the HTTP server side by side."""

from __future__ import annotations

import errno
import socket
import sys

from vllm import preflight
from vllm.config.frontend import FrontendConfig
from vllm.entrypoints.cli.arguments import engine_args, engine_parser, frontend_config
from vllm.errors import Diagnostic, ExitCode, ResourceError, VLLMError, error_from

_BACKLOG = 2048


def main(arguments: list[str]) -> int:
    """Serve until told to stop. Nothing heavy is imported before every check has passed."""
    parser = engine_parser("vllm serve", __doc__ or "", with_server=True)
    args = parser.parse_args(arguments)
    frontend = frontend_config(args)
    config = engine_args(args).create_engine_config(defer_errors=True)
    listener, taken = _try_bind(frontend)
    report = preflight.run(config, frontend, serve=True, found=taken)
    if listener is None or report.exit_code:
        if listener is not None:
            listener.close()
        raise error_from(report.findings)
    for finding in report.findings:
        print(finding, file=sys.stderr)
    from vllm.entrypoints.openai.server import run_server

    return run_server(config, frontend, listener)


def _try_bind(frontend: FrontendConfig) -> tuple[socket.socket | None, tuple[Diagnostic, ...]]:
    """The listening socket, or why there is none: a finding among the others."""
    try:
        return bind(frontend), ()
    except VLLMError as error:
        return None, error.findings


def bind(frontend: FrontendConfig) -> socket.socket:
    """Take the port now and keep it. Raises `ResourceError` if it cannot be had."""
    host, port = frontend.host or "", frontend.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ResourceError(_port_finding(host, port, error)) from None
    return listener


def _port_finding(host: str, port: int, error: OSError) -> Diagnostic:
    where = f"--host {host or '0.0.0.0'} --port {port}"
    if error.errno == errno.EADDRINUSE:
        return Diagnostic(
            "port-taken",
            f"port {port} is in use",
            why="another process listens on it",
            where=where,
            fix="--port with a free one, or end the other process",
            exit_code=ExitCode.RESOURCE,
        )
    if error.errno == errno.EACCES:
        return Diagnostic(
            "port-forbidden",
            f"port {port} may not be used",
            why="ports below 1024 need privileges",
            where=where,
            fix="--port 8000",
            exit_code=ExitCode.RESOURCE,
        )
    return Diagnostic(
        "host-unusable",
        f"--host {host} is no address of this machine",
        why=error.strerror or str(error),
        where=where,
        fix="--host 127.0.0.1, or leave it out to listen on every address",
        exit_code=ExitCode.RESOURCE,
    )
