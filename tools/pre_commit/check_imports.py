# SPDX-License-Identifier: Apache-2.0
"""Which room may import which, and which rooms stay free of torch and other slow imports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from tools.pre_commit.source import Finding, imports, module_name, run

# A room may import rooms of a rank up to its own. The longest prefix of a module decides.
RANKS = {
    "vllm.errors": 0,
    "vllm.envs": 1,
    "vllm.logger": 2,
    "vllm.sampling_params": 2,
    "vllm.outputs": 2,
    "vllm.engine.messages": 3,
    "vllm.platforms": 3,
    "vllm.models.registry": 4,
    "vllm.config": 5,
    # Readers of config.json and of tensor names: what is known about a model without torch.
    "vllm.models.layouts": 6,
    "vllm.models.inkling.configs": 6,
    "vllm.models.inkling.layout": 6,
    "vllm.engine.arg_utils": 7,
    "vllm.metrics": 7,
    "vllm.tokenizers": 7,
    "vllm.preflight": 8,
    "vllm.distributed": 8,
    # Kernels are leaves: layers and attention both launch them.
    "vllm.layers.ops": 8,
    "vllm.attention.ops": 8,
    "vllm.attention": 9,
    "vllm.layers": 9,
    "vllm.sampling": 9,
    "vllm.models": 10,
    "vllm.loader": 11,
    "vllm.worker": 11,
    "vllm.engine": 12,
    "vllm.entrypoints": 13,
    # What `vllm bench` runs: a user of `LLM` and of the HTTP API.
    "vllm.benchmarks": 14,
    "vllm": 15,
}
# Before the torch line: only the standard library and these, outside of functions.
TORCH_FREE = (
    "vllm.errors",
    "vllm.envs",
    "vllm.logger",
    "vllm.sampling_params",
    "vllm.outputs",
    "vllm.platforms",
    "vllm.models.registry",
    "vllm.models.layouts",
    "vllm.models.inkling.configs",
    "vllm.models.inkling.layout",
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm.engine.messages",
    "vllm.preflight",
    "vllm.entrypoints.cli",
)
LIGHT = ("msgspec", "pynvml")
# The API server's process never imports torch.
NO_TORCH = ("vllm.entrypoints.openai", "vllm.metrics", "vllm.engine.client", "vllm.engine.wire")
# Pure Python: they see nothing but plain data.
PURE = ("vllm.engine.scheduler", "vllm.engine.kv_cache", "vllm.engine.request_queue")
PURE_MAY_IMPORT = (
    *PURE,
    "vllm.engine.request",
    "vllm.engine.messages",
    "vllm.config",
    "vllm.errors",
    "vllm.envs",
    "vllm.logger",
)


def within(module: str, rooms: tuple[str, ...]) -> bool:
    """Is `module` one of the rooms or inside one?"""
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def room_of(module: str) -> str:
    """The longest prefix that has a rank."""
    while module not in RANKS:
        module = module.rpartition(".")[0]
    return module


def check(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Findings of one file of the package."""
    if not path.startswith("vllm/"):
        return
    module = module_name(path)
    if room_of(module) == "vllm" != module:
        yield 1, f"{module} is in no room: give it a rank in tools/pre_commit/check_imports.py"
    for imported in imports(path, tree):
        name, early = imported.module, imported.at_import_time
        if name.split(".")[0] == "vllm":
            reason = _own_reason(module, name, early)
        else:
            reason = _foreign_reason(module, name.split(".")[0], early)
        if reason:
            yield imported.line, reason


def _own_reason(module: str, imported: str, early: bool) -> str | None:
    if within(module, PURE) and not within(imported, PURE_MAY_IMPORT):
        return f"{module} is pure Python over plain data: it must not import {imported}"
    source, target = room_of(module), room_of(imported)
    if target == "vllm":
        # `from vllm import __version__`: the root itself imports nothing.
        return None
    if within(module, TORCH_FREE) and early and not within(imported, TORCH_FREE):
        return f"{module} is before the torch line: import {imported} inside a function"
    if RANKS[target] > RANKS[source]:
        return f"{source} must not import {target}: imports go only to the left of the design's row"
    return None


def _foreign_reason(module: str, package: str, early: bool) -> str | None:
    light = package in sys.stdlib_module_names or package in LIGHT
    if early and within(module, TORCH_FREE) and not light:
        return f"{module} is before the torch line: import {package} inside a function"
    if early and within(module, NO_TORCH) and package in ("torch", "transformers"):
        return f"{module} runs in the API server's process, which never imports {package}"
    return None


if __name__ == "__main__":
    sys.exit(run(check))
