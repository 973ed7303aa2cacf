# SPDX-License-Identifier: Apache-2.0
"""`vllm chat`: a conversation with a served model, or with one loaded here."""

from __future__ import annotations

from vllm.entrypoints.cli.client import Conversation, client_parser, connect, read_lines


def main(arguments: list[str]) -> int:
    """Answer each line of standard input, or one message with --quick."""
    parser = client_parser("vllm chat", __doc__ or "")
    parser.add_argument("--system-prompt", default=None, help="what the model is told first")
    parser.add_argument(
        "-q", "--quick", default=None, metavar="TEXT", help="one message, one answer"
    )
    args = parser.parse_args(arguments)
    conversation = Conversation(args.system_prompt)
    with connect(args) as model:
        for line in read_lines(args.quick, "chat"):
            conversation.ask(model, line, args.max_tokens)
    return 0
