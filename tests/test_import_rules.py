# SPDX-License-Identifier: Apache-2.0
"""Who imports whom: the rules hold over the tree, and their checker sees what breaks them."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from tools.pre_commit import check_imports, check_lazy_root
from tools.pre_commit.source import imports, module_name

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "vllm").rglob("*.py"))


def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), path)


def findings(path: str, source: str) -> list[str]:
    return [message for _, message in check_imports.check(path, ast.parse(source))]


def test_every_file_of_the_package_follows_the_rules() -> None:
    found = [f"{p}:{n}: {m}" for p in FILES for n, m in check_imports.check(p, tree_of(p))]
    assert found == []


def test_the_root_imports_nothing_but_the_standard_library() -> None:
    assert list(check_lazy_root.check("vllm/__init__.py", tree_of("vllm/__init__.py"))) == []


def test_no_two_rooms_import_each_other() -> None:
    edges: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        room = check_imports.room_of(module_name(path))
        for imported in imports(path, tree_of(path)):
            if imported.module.split(".")[0] == "vllm":
                edges[room].add(check_imports.room_of(imported.module))
    pairs = [(a, b) for a in sorted(edges) for b in sorted(edges[a]) if a < b and a in edges[b]]
    assert pairs == []


PLANTED = {
    "torch before the torch line": (
        "vllm/config/cache.py",
        "import torch",
        "vllm.config.cache is before the torch line: import torch inside a function",
    ),
    "numpy from a submodule": (
        "vllm/preflight/memory.py",
        "from numpy.linalg import norm",
        "vllm.preflight.memory is before the torch line: import numpy inside a function",
    ),
    "a heavy room, relative": (
        "vllm/config/cache.py",
        "from ..worker import executor",
        "vllm.config.cache is before the torch line: import vllm.worker.executor inside a function",
    ),
    "in a class body and a try": (
        "vllm/envs.py",
        "class A:\n    try:\n        import torch\n    except ImportError:\n        pass",
        "vllm.envs is before the torch line: import torch inside a function",
    ),
    "to the right, inside a function": (
        "vllm/layers/linear.py",
        "def f():\n    from vllm.engine.core import EngineCore",
        "vllm.layers must not import vllm.engine: imports go only to the left of the design's row",
    ),
    "entrypoints": (
        "vllm/engine/core.py",
        "from vllm.entrypoints.llm import LLM",
        "vllm.engine must not import vllm.entrypoints: "
        "imports go only to the left of the design's row",
    ),
    "the scheduler and layers": (
        "vllm/engine/scheduler.py",
        "import vllm.layers.linear",
        "vllm.engine.scheduler is pure Python over plain data: "
        "it must not import vllm.layers.linear",
    ),
    "torch in the API server": (
        "vllm/entrypoints/openai/app.py",
        "import torch.nn",
        "vllm.entrypoints.openai.app runs in the API server's process, which never imports torch",
    ),
    "a room as a name of the root": (
        "vllm/platforms/cpu.py",
        "from vllm import config",
        "vllm.platforms must not import vllm.config: "
        "imports go only to the left of the design's row",
    ),
}


def test_a_file_outside_of_the_rooms_is_found() -> None:
    assert findings("vllm/helpers.py", "") == [
        "vllm.helpers is in no room: give it a rank in tools/pre_commit/check_imports.py"
    ]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(name: str) -> None:
    path, source, message = PLANTED[name]
    assert findings(path, source) == [message]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("vllm/config/cache.py", "def f():\n    import huggingface_hub"),
        ("vllm/config/cache.py", "if TYPE_CHECKING:\n    import torch"),
        ("vllm/config/cache.py", "import msgspec\nfrom vllm.models import registry"),
        ("vllm/platforms/nvml.py", "import pynvml"),
        ("vllm/engine/core.py", "import torch\nfrom vllm.worker.executor import Executor"),
        ("benchmarks/offline.py", "import torch\nfrom vllm.entrypoints.llm import LLM"),
    ],
    ids=["late", "types only", "to the left", "nvml", "behind the line", "outside the package"],
)
def test_what_the_rules_allow_is_not_found(path: str, source: str) -> None:
    assert findings(path, source) == []


def test_an_else_of_type_checking_is_not_exempt() -> None:
    source = "if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy"
    (message,) = findings("vllm/config/cache.py", source)
    assert "import numpy inside a function" in message


def test_the_root_checker_finds_a_planted_import() -> None:
    tree = ast.parse("import sys\nfrom vllm.outputs import RequestOutput")
    ((line, message),) = check_lazy_root.check("vllm/__init__.py", tree)
    assert (line, message) == (
        2,
        "vllm.outputs.RequestOutput must be imported by __getattr__, on first use",
    )
