# SPDX-License-Identifier: Apache-2.0
"""`import vllm` imports nothing but the standard library: its names are looked up on first use."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from tools.pre_commit.source import Finding, imports, run


def check(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Findings in the package's root."""
    if path != "vllm/__init__.py":
        return
    for imported in imports(path, tree):
        root = imported.module.split(".")[0]
        if imported.at_import_time and root not in sys.stdlib_module_names:
            yield imported.line, f"{imported.module} must be imported by __getattr__, on first use"


if __name__ == "__main__":
    sys.exit(run(check))
