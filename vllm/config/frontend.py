# SPDX-License-Identifier: Apache-2.0
"""The HTTP server's settings."""

from __future__ import annotations

import dataclasses
import os

from vllm.config.fields import check_values, option, raise_usage, wrong_value
from vllm.errors import Diagnostic

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclasses.dataclass
class FrontendConfig:
    """HTTP server."""

    host: str | None = None
    """Address to listen on; unset: every one."""
    port: int = 8000
    """Port to listen on; 0: any free one."""
    api_key: list[str] | None = option(None)
    """Keys of which clients must send one, as a bearer token."""
    allow_credentials: bool = False
    """Let browsers send credentials."""
    allowed_origins: list[str] = option(["*"])
    """Origins that browsers may call from."""
    allowed_methods: list[str] = option(["*"])
    """Methods that browsers may use."""
    allowed_headers: list[str] = option(["*"])
    """Headers that browsers may send."""
    root_path: str = ""
    """Path under which a proxy serves the API."""
    chat_template: str | None = None
    """File with the chat template, or the template itself."""
    response_role: str = "assistant"
    """Role of the answers in /v1/chat/completions."""
    enable_auto_tool_choice: bool = False
    """Let the model decide to call tools; needs --tool-call-parser."""
    tool_call_parser: str | None = option(None, choices=("hermes", "inkling"))
    """How tool calls are read out of the answer."""
    uvicorn_log_level: str = option("warning", choices=LOG_LEVELS)
    """Log level of the HTTP server."""
    disable_uvicorn_access_log: bool = False
    """Do not log each request at --uvicorn-log-level info."""
    enable_log_requests: bool = False
    """Log each request's id, length and sampling parameters."""
    disable_log_stats: bool = False
    """Do not log throughput every 10 seconds."""

    def __post_init__(self) -> None:
        findings = check_values(self)
        if type(self.port) is not int or not 0 <= self.port <= 65535:
            findings.append(wrong_value("--port", self.port, "a number from 0 to 65535"))
        raise_usage(findings)

    def check(self) -> list[Diagnostic]:
        """Settings that contradict each other or name a file that is not there."""
        findings = []
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            findings.append(
                Diagnostic(
                    "tool-call-parser",
                    "--enable-auto-tool-choice needs --tool-call-parser",
                    why="without it the server cannot tell a tool call from text",
                    fix="--tool-call-parser hermes or inkling",
                )
            )
        template = self.chat_template
        if template and not any(c in template for c in "{}\n") and not os.path.isfile(template):
            findings.append(
                Diagnostic(
                    "chat-template-file",
                    f"--chat-template {template} is no file",
                    why="nor is it a template, which would hold {{ }} or {% %}",
                    fix="give the path of a .jinja file",
                )
            )
        return findings
