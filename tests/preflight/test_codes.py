# SPDX-License-Identifier: Apache-2.0
"""Every code that the engine can print is explained, and nothing else is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from vllm.preflight.codes import CODES

PACKAGE = Path(__file__).parents[2] / "vllm"
# Helpers that take a code as an argument, and names that hold one.
MAKERS = {"Diagnostic", "_fail", "fail", "_refuse", "finding"}
NAMES = {"code"}
_CODE = re.compile(r"[a-z]+(-[a-z]+)+|usage")


def codes_in(path: Path) -> set[str]:
    """String literals of a file that are used as a finding's code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in MAKERS and node.args:
                found |= literals(node.args[0])
            found |= {c for k in node.keywords if k.arg in NAMES for c in literals(k.value)}
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    for name_node, value in zip(target.elts, node.value.elts, strict=True):
                        if isinstance(name_node, ast.Name) and name_node.id in NAMES:
                            found |= literals(value)
                elif isinstance(target, ast.Name) and target.id in NAMES:
                    found |= literals(node.value)
    return {c for c in found if _CODE.fullmatch(c)}


def literals(node: ast.AST) -> set[str]:
    """Every string in an expression; an f-string counts with each of its known forms."""
    if isinstance(node, ast.JoinedStr):
        return {"unknown-command", "unknown-option"}  # the one there is: f"unknown-{what}"
    return {
        n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }


def test_the_table_and_the_code_agree() -> None:
    used: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "codes.py" and "openai" not in path.parts:
            used |= dict.fromkeys(codes_in(path), path.name)
    missing = {code: name for code, name in used.items() if code not in CODES}
    assert not missing
    # A default argument of RequestError, which is what requests get.
    assert set(CODES) - set(used) <= {"invalid-request", "engine-died", "usage", "json-broken"}


def test_every_explanation_is_one_sentence() -> None:
    assert all(text.endswith(".") and text.isascii() for text in CODES.values())
    assert all(len(text) > 20 and ". " not in text for text in CODES.values())
