# SPDX-License-Identifier: Apache-2.0
"""Parsing and reporting that the checks share."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

Finding = tuple[int, str]
"""Line and message."""
Check = Callable[[str, ast.Module], Iterator[Finding]]
"""A check gets the path from the repository's root and the tree."""


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module."""

    module: str
    line: int
    at_import_time: bool
    """Outside of functions, so that importing the file runs it."""


def module_name(path: str) -> str:
    """`vllm/config/__init__.py` to `vllm.config`."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: str, tree: ast.Module) -> Iterator[Import]:
    """Every import of a file but those under `if TYPE_CHECKING`, which never run."""
    yield from _imports(module_name(path), path.endswith("__init__.py"), tree, True)


def _imports(module: str, is_package: bool, node: ast.AST, early: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(name.name, child.lineno, early) for name in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(module, is_package, child)
            # `from vllm import envs` imports vllm.envs; a class's name at the end does no harm,
            # as rules go by prefixes.
            own = base.split(".")[0] == "vllm"
            names = [f"{base}.{n.name}" if own else base for n in child.names]
            yield from (Import(name, child.lineno, early) for name in names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            orelse = ast.Module(body=child.orelse, type_ignores=[])
            yield from _imports(module, is_package, orelse, early)
        else:
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(module, is_package, child, early and not function)


def _absolute(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    keep = len(parts) - node.level + is_package
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def run(check: Check) -> int:
    """Check the files named on the command line; 1 if there are findings."""
    status = 0
    for path in sys.argv[1:]:
        if not path.endswith(".py"):
            continue
        tree = ast.parse(Path(path).read_text(encoding="utf-8"), path)
        for line, message in check(PurePosixPath(path).as_posix(), tree):
            print(f"{path}:{line}: {message}")
            status = 1
    return status
