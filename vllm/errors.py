# SPDX-License-Identifier: Apache-2.0
"""What can go wrong and how it is told: findings, exceptions, exit codes.

A `Diagnostic` is one finding. Code raises it where the knowledge is; only the
edge (command line, HTTP layer) formats it. Imports nothing but the standard
library, so every other room may use it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Literal


class ExitCode(enum.IntEnum):
    """Process exit status by kind of failure; documented in docs/errors.md."""

    OK = 0
    CRASH = 1
    """A defect of ours."""
    USAGE = 2
    """A wrong flag or value."""
    HARDWARE = 3
    """This hardware cannot run it."""
    CONFIG = 4
    """The model's configuration or files."""
    RESOURCE = 5
    """A port or another resource is taken."""


Severity = Literal["error", "warning", "info"]


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """One finding: what is wrong, why, where, and what to do.

    `code` is a stable kebab-case name with a heading in docs/errors.md; the
    other fields are ASCII sentences without a final full stop.
    """

    code: str
    subject: str
    why: str = ""
    where: str = ""
    fix: str = ""
    see: str = ""
    severity: Severity = "error"
    exit_code: ExitCode = ExitCode.CONFIG

    def __str__(self) -> str:
        lines = [f"{self.severity}[{self.code}]: {_one_line(self.subject)}"]
        for label in ("why", "where", "fix", "see"):
            text = getattr(self, label)
            if text:
                lines.append(f"  {label}: {_one_line(text)}")
        return "\n".join(lines)


_MAX_LINE = 400


def _one_line(text: str) -> str:
    """Printable ASCII on one line of bounded length: names in files may hold anything."""
    shown = "".join(c if " " <= c < "\x7f" else _escaped(c) for c in text[:_MAX_LINE])
    return shown if len(text) <= _MAX_LINE else shown + " ..."


def _escaped(character: str) -> str:
    if character == "\n":
        return " "
    return character.encode("unicode_escape").decode("ascii")


_SEVERITY_ORDER = {"error": 0, "warning": 1, "info": 2}


def worst_first(findings: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Sort by severity, then by exit code, so that the decisive one leads; stable."""
    return sorted(findings, key=lambda d: (_SEVERITY_ORDER[d.severity], d.exit_code))


class VLLMError(ValueError):
    """Base of every error a user can cause; `str()` is what the user reads."""

    default_exit_code = ExitCode.CONFIG

    def __init__(self, *findings: Diagnostic) -> None:
        self.findings = tuple(worst_first(findings))
        super().__init__("\n".join(str(d) for d in self.findings))

    @property
    def exit_code(self) -> ExitCode:
        """The exit status that the worst finding asks for."""
        errors = [d for d in self.findings if d.severity == "error"]
        return errors[0].exit_code if errors else self.default_exit_code

    def __reduce__(self) -> tuple[type[VLLMError], tuple[Diagnostic, ...]]:
        # Exceptions cross process borders; the message alone would not rebuild us.
        return type(self), self.findings


class UsageError(VLLMError):
    """A wrong flag, value or argument (exit code 2)."""

    default_exit_code = ExitCode.USAGE


class UnsupportedHardwareError(VLLMError):
    """The devices that would be used cannot run this (exit code 3)."""

    default_exit_code = ExitCode.HARDWARE


class UnsupportedModelError(UnsupportedHardwareError):
    """A model architecture that these devices have no kernel for (exit code 3)."""


class ConfigError(VLLMError):
    """Configuration or files that cannot work anywhere (exit code 4)."""


class ResourceError(VLLMError):
    """A port, memory or another resource is taken (exit code 5)."""

    default_exit_code = ExitCode.RESOURCE


class RequestError(VLLMError):
    """A request that cannot be served; HTTP layers answer 400 with `param`."""

    default_exit_code = ExitCode.USAGE

    def __init__(
        self, message: str, param: str | None = None, code: str = "invalid-request"
    ) -> None:
        self.message = message
        self.param = param
        self.code = code
        super().__init__(Diagnostic(code, message, where=param or "", exit_code=ExitCode.USAGE))

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return type(self), (self.message, self.param, self.code)


def error_from(findings: Iterable[Diagnostic]) -> VLLMError:
    """The exception whose class tells the kind of the worst finding; carries all."""
    ordered = worst_first(findings)
    types: dict[ExitCode, type[VLLMError]] = {
        ExitCode.USAGE: UsageError,
        ExitCode.HARDWARE: UnsupportedHardwareError,
        ExitCode.RESOURCE: ResourceError,
    }
    return types.get(ordered[0].exit_code, ConfigError)(*ordered)


class EngineDeadError(RuntimeError):
    """The engine core or a worker is gone; the message carries the root cause."""
