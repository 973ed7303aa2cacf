# SPDX-License-Identifier: Apache-2.0
"""`torch.cuda` is used only where CUDA is the subject; others ask `current_platform`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from tools.pre_commit.source import Finding, run

OWNERS = (
    "vllm/platforms/cuda.py",
    "vllm/platforms/rocm.py",
    "vllm/worker/",
    # Facts of the device that a kernel is about to run on.
    "vllm/layers/ops/chips.py",
    "vllm/distributed/",
)


def check(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Findings of one file of the package."""
    if not path.startswith("vllm/") or path.startswith(OWNERS):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
            yield node.lineno, "torch.cuda belongs to the CUDA platform and the worker"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            names = [alias.name for alias in node.names]
            if module.startswith("torch.cuda") or any(n.startswith("torch.cuda") for n in names):
                yield node.lineno, "torch.cuda belongs to the CUDA platform and the worker"


if __name__ == "__main__":
    sys.exit(run(check))
