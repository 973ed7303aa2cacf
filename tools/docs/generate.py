# SPDX-License-Identifier: Apache-2.0
"""Markdown made from its source: flags, settings, environment variables, error codes.

`python -m tools.docs.generate DIR` writes the pages into a folder; the site's build asks
`pages()`. What a page says therefore cannot be older than the code.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    ("serve",),
    ("preflight",),
    ("chat",),
    ("complete",),
    ("bench",),
    ("bench", "throughput"),
    ("bench", "latency"),
    ("bench", "serve"),
    ("bench", "startup"),
    ("collect-env",),
)
_EXIT_NAMES = {"OK": 0, "CRASH": 1, "USAGE": 2, "HARDWARE": 3, "CONFIG": 4, "RESOURCE": 5}


def pages() -> dict[str, str]:
    """Path below docs/ to the page's Markdown."""
    return {
        "cli/reference.md": cli_reference(),
        "configuration/engine_args.md": configuration_reference(),
        "usage/environment_variables.md": environment_variables(),
        "errors.md": error_codes(),
    }


def cli_reference() -> str:
    """Every command with its own `--help`, as the command line prints it."""
    parts = ["# Command line\n", "Made from `vllm --help` of this version.\n"]
    for command in ((), *COMMANDS):
        title = " ".join(("vllm", *command))
        parts.append(f"## `{title}`\n\n```text\n{help_text(command)}\n```\n")
    return "\n".join(parts)


def help_text(command: tuple[str, ...]) -> str:
    """What `vllm COMMAND --help` prints; raises if it does not exit with 0."""
    code = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main())"
    finished = subprocess.run(
        [sys.executable, "-c", code, *command, "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if finished.returncode != 0:
        raise RuntimeError(f"vllm {' '.join(command)} --help failed: {finished.stderr}")
    return finished.stdout.replace("usage: -c", "usage: vllm").rstrip()


def configuration_reference() -> str:
    """A table for each config class: flag, type, default, meaning."""
    from vllm.config.frontend import FrontendConfig
    from vllm.engine.arg_utils import ENGINE_CONFIGS

    parts = [
        "# Settings\n",
        "Every setting is a flag of `vllm serve` and `vllm preflight`, and, without the dashes and "
        "with underscores, a keyword of `LLM` and `EngineArgs`. The HTTP server's settings are "
        "flags of `vllm serve` only. Made from the dataclasses in `vllm/config/`.\n",
    ]
    for cls in (*ENGINE_CONFIGS, FrontendConfig):
        parts.append(f"## {cls.__name__}\n\n{(cls.__doc__ or '').splitlines()[0]}\n")
        parts.append(_settings_table(cls))
    return "\n".join(parts)


def _settings_table(cls: type) -> str:
    from vllm.config.fields import field_docs, flag_of
    from vllm.engine.arg_utils import config_fields

    docs = field_docs(cls)
    rows = ["| flag | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in config_fields(cls):
        choices = field.metadata.get("choices")
        kind = ", ".join(choices) if choices else str(field.type)
        row = (f"`{flag_of(field)}`", _cell(kind), _default(field), _cell(docs[field.name], False))
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows) + "\n"


def _default(field: Any) -> str:
    default = field.default
    if callable(field.default_factory):
        default = field.default_factory()
    return "" if default in (None, "") else _cell(str(default))


def _cell(text: str, code: bool = True) -> str:
    escaped = text.replace("|", "\\|")
    return f"`{escaped}`" if code else escaped


def environment_variables() -> str:
    """The table in vllm/envs.py."""
    from vllm import envs

    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for name, variable in envs.VARIABLES.items():
        default = "" if variable.default in (None, "") else f"`{variable.default}`"
        rows.append(f"| `{name}` | {default} | {_cell(variable.doc, False)} |")
    head = "# Environment variables\n\nMade from the table in `vllm/envs.py`.\n"
    return "\n".join([head, *rows]) + "\n"


def error_codes() -> str:
    """A heading for each code of a finding, with the message's template and its cure."""
    parts = [
        "# Errors\n",
        "Every error that a user can cause has a code, a reason and a cure. The exit status says "
        "what kind it is: 1 a defect of ours, 2 wrong usage, 3 this hardware cannot run it, "
        "4 configuration or files, 5 a port or another resource is taken. "
        "Made from the code; `...` stands for what differs from case to case.\n",
    ]
    known = _documented_codes()
    found = sorted(diagnostics(ROOT / "vllm"), key=lambda call: call[0])
    for code in sorted({call[0] for call in found} | set(known)):
        parts.append(f"## {code}\n")
        if code in known:
            parts.append(f"{known[code]}\n")
        texts = dict.fromkeys(text for name, text in found if name == code)
        parts.extend(f"```text\n{text}\n```\n" for text in texts)
    return "\n".join(parts)


def _documented_codes() -> dict[str, str]:
    """Explanations by code from `vllm/preflight/codes.py`, where it has one."""
    if importlib.util.find_spec("vllm.preflight.codes") is None:
        return {}
    codes = importlib.import_module("vllm.preflight.codes").CODES
    return {code: str(getattr(entry, "doc", entry)) for code, entry in codes.items()}


def diagnostics(folder: Path) -> Iterator[tuple[str, str]]:
    """Code and message template of every `Diagnostic(...)` with a literal code."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Diagnostic"):
                if node.args and isinstance(node.args[0], ast.Constant):
                    yield str(node.args[0].value), _message(node)


def _message(call: ast.Call) -> str:
    fields = {k.arg: k.value for k in call.keywords if k.arg}
    severity = _template(fields["severity"]) if "severity" in fields else "error"
    subject = _template(call.args[1] if len(call.args) > 1 else fields.get("subject"))
    lines = [f"{severity}[{_template(call.args[0])}]: {subject}"]
    for label in ("why", "where", "fix", "see"):
        if text := _template(fields.get(label)):
            lines.append(f"  {label}: {text}")
    code = (
        ast.unparse(fields["exit_code"]).rpartition(".")[2] if "exit_code" in fields else "CONFIG"
    )
    if severity == "error" and code in _EXIT_NAMES:
        lines.append(f"exit status {_EXIT_NAMES[code]}")
    return "\n".join(lines)


def _template(node: ast.expr | None) -> str:
    """The literal text of an expression, with `...` for what is filled in."""
    if node is None:
        return ""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(v) if isinstance(v, ast.Constant) else "..." for v in node.values)
    if isinstance(node, ast.BinOp):
        return _template(node.left) + _template(node.right)
    return "..."


def main() -> int:
    """Write every page below the folder named on the command line."""
    target = Path(sys.argv[1])
    for name, text in pages().items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
