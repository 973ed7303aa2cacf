# SPDX-License-Identifier: Apache-2.0
"""`vllm COMMAND ...`: finds the command, runs it, and tells errors once, without a traceback."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import vllm
from vllm.errors import Diagnostic, ExitCode, UsageError, VLLMError

COMMANDS = {
    "serve": "Serve a model over the OpenAI-compatible HTTP API",
    "preflight": "Tell whether and how a model would run, without loading it",
    "chat": "Chat with a served model, or with one loaded here",
    "complete": "Complete text with a served model, or with one loaded here",
    "bench": "Measure throughput, latency, serving or start-up",
    "collect-env": "Print what a bug report should say of this machine",
}
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status of the design's table."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except VLLMError as error:
        return report(error)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return ExitCode.OK


def report(error: VLLMError) -> int:
    """Print an error's findings on stderr; with VLLM_LOGGING_LEVEL=DEBUG its traceback first."""
    from vllm import envs

    if envs.VLLM_LOGGING_LEVEL == "DEBUG":
        import traceback

        traceback.print_exception(error)
    print(error, file=sys.stderr)
    return error.exit_code


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return ExitCode.OK if arguments else ExitCode.USAGE
    if arguments[0] in ("-v", "--version"):
        print(vllm.__version__)
        return ExitCode.OK
    name, *rest = arguments
    if name not in COMMANDS:
        raise UsageError(_unknown(name))
    module = importlib.import_module(f"vllm.entrypoints.cli.{name.replace('-', '_')}")
    try:
        return int(module.main(rest))
    except SystemExit as stop:  # argparse's --help
        return stop.code if isinstance(stop.code, int) else ExitCode.OK


def _usage() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = ["usage: vllm COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<{width}}{text}" for name, text in COMMANDS.items()]
    lines += ["", "vllm COMMAND --help lists a command's options; vllm --version the version."]
    return "\n".join(lines)


def _unknown(name: str) -> Diagnostic:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=2)
    what = "option" if name.startswith("-") else "command"
    return Diagnostic(
        f"unknown-{what}",
        f"vllm has no {what} {name!r}",
        fix=f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(COMMANDS)}",
        exit_code=ExitCode.USAGE,
    )


if __name__ == "__main__":
    sys.exit(main())
