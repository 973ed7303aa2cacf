# SPDX-License-Identifier: Apache-2.0
"""`with a and b:` enters only `b`; two context managers are separated by a comma."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from tools.pre_commit.source import Finding, run


def check(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Findings of one file."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                if isinstance(item.context_expr, ast.BoolOp):
                    yield (
                        node.lineno,
                        "a boolean operator in `with` enters one of its operands only",
                    )


if __name__ == "__main__":
    sys.exit(run(check))
