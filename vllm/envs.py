# SPDX-License-Identifier: Apache-2.0
"""Every VLLM_* environment variable: type, default and meaning in one table.

Read as `envs.VLLM_X`; the value is taken from the environment at each access,
so a test or a caller can change it at run time.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    VLLM_LOGGING_LEVEL: str
    VLLM_CPU_KVCACHE_SPACE: float | None
    VLLM_CPU_OMP_THREADS_BIND: str
    VLLM_HOST_IP: str
    VLLM_PORT: int | None
    VLLM_API_KEY: str | None
    VLLM_ENABLE_V1_MULTIPROCESSING: bool
    VLLM_WORKER_MULTIPROC_METHOD: str
    VLLM_ENGINE_ITERATION_TIMEOUT_S: float
    VLLM_TARGET_DEVICE: str


def _bool(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")


@dataclasses.dataclass(frozen=True)
class EnvVar:
    """One variable: how it is read, its default, and what it means."""

    parse: Callable[[str], Any]
    default: Any
    doc: str


VARIABLES: dict[str, EnvVar] = {
    "VLLM_LOGGING_LEVEL": EnvVar(
        str.upper, "INFO", "Log level; DEBUG also prints tracebacks of user errors."
    ),
    "VLLM_CPU_KVCACHE_SPACE": EnvVar(
        float, None, "KV cache size on the CPU in GiB; unset: a share of the free memory."
    ),
    "VLLM_CPU_OMP_THREADS_BIND": EnvVar(
        str, "auto", "CPU cores for inference threads, such as 0-3,8; auto: every usable core."
    ),
    "VLLM_HOST_IP": EnvVar(str, "", "Address of this host for multi-host runs."),
    "VLLM_PORT": EnvVar(int, None, "First port for internal communication; unset: any free port."),
    "VLLM_API_KEY": EnvVar(str, None, "API key that the server asks of clients."),
    "VLLM_ENABLE_V1_MULTIPROCESSING": EnvVar(
        _bool, False, "Run the engine core of LLM() in its own process."
    ),
    "VLLM_WORKER_MULTIPROC_METHOD": EnvVar(
        str, "spawn", "How worker processes are started; only spawn is supported."
    ),
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": EnvVar(
        float, 60.0, "Seconds without engine progress after which /health answers 503."
    ),
    "VLLM_TARGET_DEVICE": EnvVar(
        str, "", "Platform to use (cuda, rocm, cpu) instead of the detected one."
    ),
}


def __getattr__(name: str) -> Any:
    try:
        variable = VARIABLES[name]
    except KeyError:
        raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}") from None
    text = os.environ.get(name)
    if text is None or text == "":
        return variable.default
    try:
        return variable.parse(text)
    except ValueError:
        from vllm.errors import Diagnostic, ExitCode, UsageError

        raise UsageError(
            Diagnostic(
                "invalid-environment",
                f"{name}={text!r} is not a valid {variable.parse.__name__}",
                fix=f"unset {name} or correct it ({variable.doc.rstrip('.')})",
                exit_code=ExitCode.USAGE,
            )
        ) from None


def __dir__() -> list[str]:
    return sorted(VARIABLES)
