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
    VLLM_CPU_OMP_THREADS_BIND: list[list[int]] | None
    VLLM_HOST_IP: str
    VLLM_PORT: int | None
    VLLM_API_KEY: str | None
    VLLM_ENABLE_V1_MULTIPROCESSING: bool
    VLLM_ENGINE_ITERATION_TIMEOUT_S: float
    VLLM_TARGET_DEVICE: str


def _bool(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")


def _core_list(text: str) -> list[list[int]] | None:
    """Cores of each rank of "0-3,8|4-7"; None for auto and nobind, which leave it to the system."""
    if text in ("auto", "nobind"):
        return None
    ranks = []
    for part in text.split("|"):
        pieces = [piece.partition("-") for piece in part.split(",")]
        ranges = [range(int(first), int(last or first) + 1) for first, _, last in pieces]
        if not all(ranges):
            raise ValueError("an empty range")
        ranks.append([core for cores in ranges for core in cores])
    return ranks


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
        _core_list,
        None,
        "CPU cores of each rank's threads, such as 0-3,8 or 0-3|4-7; auto: every usable core.",
    ),
    "VLLM_HOST_IP": EnvVar(str, "", "Address of this host for multi-host runs."),
    "VLLM_PORT": EnvVar(int, None, "First port for internal communication; unset: any free port."),
    "VLLM_API_KEY": EnvVar(str, None, "API key that the server asks of clients."),
    "VLLM_ENABLE_V1_MULTIPROCESSING": EnvVar(
        _bool, False, "Run the engine core of LLM() in its own process."
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
                f"{name}={text!r} is not a valid {_name(variable.parse)}",
                fix=f"unset {name} or correct it ({variable.doc.rstrip('.')})",
                exit_code=ExitCode.USAGE,
            )
        ) from None


def _name(parse: Callable[[str], Any]) -> str:
    return parse.__name__.strip("_").replace("_", " ")


def __dir__() -> list[str]:
    return sorted(VARIABLES)
