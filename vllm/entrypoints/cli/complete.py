# SPDX-License-Identifier: Apache-2.0
"""`vllm complete`: continue text with a served model, or with one loaded here."""

from __future__ import annotations

from vllm.entrypoints.cli.client import client_parser, connect, read_lines


def main(arguments: list[str]) -> int:
    """Continue each line of standard input, or one text with --quick."""
    parser = client_parser("vllm complete", __doc__ or "")
    parser.add_argument("-q", "--quick", default=None, metavar="TEXT", help="one text to continue")
    args = parser.parse_args(arguments)
    with connect(args) as model:
        for line in read_lines(args.quick, "text"):
            for piece in model.complete(line, args.max_tokens):
                print(piece, end="", flush=True)
            print()
    return 0
