# SPDX-License-Identifier: Apache-2.0
"""How config dataclasses describe themselves: value checks and documentation from one source.

A field's help is the string literal below it; its default and type are the field's own.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Sequence
from typing import Any

from vllm.errors import Diagnostic, ExitCode, UsageError


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Help text by field name, read from the class's source (only --help and the docs ask)."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    docs = {}
    for node, following in zip(body, body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
            if isinstance(following.value, ast.Constant):
                docs[node.target.id] = " ".join(str(following.value.value).split())  # type: ignore[union-attr]
    return docs


def option(default: Any, *, choices: Sequence[str] | None = None, flag: str | None = None,
           aliases: Sequence[str] = (), parse: Any = None, minimum: float | None = None,
           cli: bool = True) -> Any:  # fmt: skip
    """A dataclass field with what the command line needs beyond its type and default.

    `flag` replaces the name made of the field's; `parse` reads the text of the command line;
    `cli=False` keeps a field off the command line; mutable defaults are copied.
    """
    metadata = {"choices": choices, "flag": flag, "aliases": tuple(aliases), "parse": parse,
                "minimum": minimum, "cli": cli}  # fmt: skip
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def derived(default: Any = None) -> Any:
    """A field that validation fills in; neither an argument nor a flag."""
    return dataclasses.field(default=default, init=False, repr=False, metadata={"cli": False})


def flag_of(field: dataclasses.Field[Any]) -> str:
    """The command line's spelling of a field."""
    return field.metadata.get("flag") or "--" + field.name.replace("_", "-")


def check_values(config: Any) -> list[Diagnostic]:
    """Choices and minimums of every field; in Python a wrong value has no parser before it."""
    findings = []
    for field in dataclasses.fields(config):
        value, choices = getattr(config, field.name), field.metadata.get("choices")
        minimum = field.metadata.get("minimum")
        if value is None or not field.init:
            continue
        if choices and value not in choices:
            findings.append(wrong_value(flag_of(field), value, f"one of {', '.join(choices)}"))
        elif minimum is not None and not _at_least(value, minimum):
            findings.append(wrong_value(flag_of(field), value, f"a number from {minimum}"))
    return findings


def _at_least(value: Any, minimum: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= minimum


def wrong_value(flag: str, value: Any, wanted: str) -> Diagnostic:
    """The finding for a value that no model and no machine would make right."""
    return Diagnostic(
        "invalid-value",
        f"{flag} {value!r} is not allowed",
        fix=f"give {wanted}",
        exit_code=ExitCode.USAGE,
    )


def raise_usage(findings: list[Diagnostic]) -> None:
    """Raise `UsageError` if there are any."""
    if findings:
        raise UsageError(*findings)
