# SPDX-License-Identifier: Apache-2.0
"""Every code that the engine can print is explained, and nothing else is."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from vllm.errors import ExitCode
from vllm.preflight.codes import CODES, findings_table

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm"
# Helpers that take a code as an argument, and names that hold one.
MAKERS = {"Diagnostic", "_fail", "fail", "_refuse", "finding"}
NAMES = {"code"}
_CODE = re.compile(r"[a-z]+(-[a-z]+)+|usage")


def codes_in(tree: ast.AST) -> set[str]:
    """String literals of a file that are used as a finding's code."""
    found = set()
    for node in ast.walk(tree):
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


def trees() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "codes.py" and "openai" not in path.parts:
            yield path.name, ast.parse(path.read_text())


def exit_codes() -> dict[str, set[ExitCode]]:
    """Code to the exit statuses of the `Diagnostic(...)`s that name it; no status: a warning."""
    found: dict[str, set[ExitCode]] = defaultdict(set)
    for _, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "Diagnostic":
                continue
            fields = {k.arg: k.value for k in node.keywords}
            severity = literals(fields["severity"]) if "severity" in fields else {"error"}
            status = (
                ast.unparse(fields["exit_code"]) if "exit_code" in fields else "ExitCode.CONFIG"
            )
            for code in literals(node.args[0]):
                if severity == {"error"}:
                    found[code] |= {
                        ExitCode[name] for name in re.findall(r"ExitCode\.(\w+)", status)
                    }
                else:
                    found[code] |= set()
    return found


def test_the_table_and_the_code_agree() -> None:
    used: dict[str, str] = {}
    for name, tree in trees():
        used |= dict.fromkeys(codes_in(tree), name)
    missing = {code: name for code, name in used.items() if code not in CODES}
    assert not missing
    assert set(CODES) - set(used) == {"invalid-request"}  # a default of RequestError


def test_the_table_s_exit_statuses_are_those_of_the_code() -> None:
    for code, statuses in exit_codes().items():
        assert set(CODES[code].exit_codes) == statuses, code


def test_every_explanation_is_a_sentence_of_cause_and_one_of_cure() -> None:
    for code, entry in CODES.items():
        for text in (entry.cause, entry.cure):
            assert text.endswith(".") and text.isascii() and "|" not in text, code
            assert len(text) > 8 and ". " not in text, code


def test_the_page_s_table_is_the_code_s() -> None:
    page = (ROOT / "docs" / "usage" / "preflight.md").read_text()
    assert page.count(findings_table()) == 1
    assert page.rstrip().endswith(findings_table())
