# SPDX-License-Identifier: Apache-2.0
"""`vllm bench throughput|latency|serve|startup`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Any

from vllm.engine.arg_utils import FlexibleArgumentParser
from vllm.entrypoints.cli.arguments import engine_args, engine_parser
from vllm.errors import Diagnostic, ExitCode, UsageError

KINDS = {
    "throughput": "tokens a second of a batch of requests, offline",
    "latency": "time of one batch from prompt to last token, offline",
    "serve": "throughput and latencies of a running server under load",
    "startup": "time until an engine is ready",
}


def main(arguments: list[str]) -> int:
    """Run one benchmark."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: vllm bench KIND [options]\n\nkinds:")
        for kind, text in KINDS.items():
            print(f"  {kind:<12}{text}")
        return ExitCode.OK if arguments else ExitCode.USAGE
    kind, *rest = arguments
    if kind not in KINDS:
        raise UsageError(
            Diagnostic(
                "unknown-command",
                f"vllm bench has no kind {kind!r}",
                fix=f"one of {', '.join(KINDS)}",
                exit_code=ExitCode.USAGE,
            )
        )
    args = _parser(kind).parse_args(rest)
    engine = None if kind == "serve" else engine_args(args)
    benchmark = importlib.import_module("vllm.benchmarks").BENCHMARKS[kind]
    result: dict[str, Any] = benchmark(args, engine)
    for name, value in result.items():
        shown = f"{value:,.3f}" if isinstance(value, float) else value
        print(f"{name:<36} {shown}")
    if args.output_json:
        with open(args.output_json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
    sys.stdout.flush()
    return ExitCode.OK


def _parser(kind: str) -> FlexibleArgumentParser:
    prog = f"vllm bench {kind}"
    if kind == "serve":
        parser = FlexibleArgumentParser(prog=prog, description=KINDS[kind])
        _serve_flags(parser)
    else:
        parser = engine_parser(prog, KINDS[kind], with_server=False)
    add = parser.add_argument
    add(
        "--input-len", "--random-input-len", type=_positive, default=128, help="prompt tokens (128)"
    )
    add("--output-len", "--random-output-len", type=_positive, default=128, help="new tokens (128)")
    if kind in ("throughput", "serve"):
        add("--num-prompts", type=_positive, default=64, help="requests (64)")
    if kind == "latency":
        add("--batch-size", type=_positive, default=8, help="requests at once (8)")
    if kind in ("latency", "startup"):
        add("--num-iters", type=_positive, default=3, help="repetitions (3)")
    add("--output-json", default=None, metavar="FILE", help="write the figures as JSON")
    return parser


def _serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", default="http://localhost:8000", help="the server")
    parser.add_argument("--model", default=None, help="served name (default: the first one)")
    parser.add_argument(
        "--request-rate", type=float, default=float("inf"), help="requests a second (all at once)"
    )
    parser.add_argument(
        "--max-concurrency", type=_positive, default=None, help="open at once (all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrival times (0)")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("give a number from 1")
    return number
