# SPDX-License-Identifier: Apache-2.0
"""Every field of a class that users configure has a default and a docstring below it.

These classes are the dataclasses in vllm/config/ whose name ends in Config; the docstring is
the flag's help and the documentation. `VllmConfig` only joins them, `KVCacheConfig` is a plan.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from tools.pre_commit.source import Finding, run

NOT_CONFIGURED = ("VllmConfig", "KVCacheConfig")


def check(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Findings of one file of vllm/config/."""
    if not path.startswith("vllm/config/"):
        return
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name not in NOT_CONFIGURED:
            if node.name.endswith("Config") and _is_dataclass(node):
                yield from _check_class(node)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _is_not_a_field(node: ast.AnnAssign) -> bool:
    return any(name in ast.unparse(node.annotation) for name in ("ClassVar", "InitVar"))


def _is_derived(value: ast.expr) -> bool:
    """Filled in by validation or by the caller's machinery: no flag, no argument of a user."""
    text = ast.unparse(value)
    return text.startswith("derived(") or "cli=False" in text


def _check_class(node: ast.ClassDef) -> Iterator[Finding]:
    for field, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or _is_not_a_field(field):
            continue
        name = f"{node.name}.{ast.unparse(field.target)}"
        if field.value is None:
            yield field.lineno, f"{name} has no default"
        if field.value is not None and _is_derived(field.value):
            continue
        value = following.value if isinstance(following, ast.Expr) else None
        if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
            yield field.lineno, f"{name} has no docstring below it"


if __name__ == "__main__":
    sys.exit(run(check))
