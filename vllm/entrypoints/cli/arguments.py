# SPDX-License-Identifier: Apache-2.0
"""What several commands' parsers share."""

from __future__ import annotations

import argparse
from typing import Any

from vllm.config.frontend import FrontendConfig
from vllm.engine.arg_utils import EngineArgs, FlexibleArgumentParser, add_config_args, config_fields
from vllm.errors import Diagnostic, ExitCode, UsageError


def engine_parser(prog: str, description: str, with_server: bool) -> FlexibleArgumentParser:
    """A parser of a model and every engine flag; with the server's if asked for."""
    parser = FlexibleArgumentParser(prog=prog, description=description)
    parser.add_argument(
        "model_tag",
        nargs="?",
        default=None,
        metavar="MODEL",
        help="directory, GGUF file or hub id; default: the embedded SmolLM2-135M-Instruct",
    )
    EngineArgs.add_cli_args(parser)
    if with_server:
        add_config_args(parser, FrontendConfig)
    return parser


def engine_args(args: argparse.Namespace) -> EngineArgs:
    """The engine's settings of parsed flags. The model may be given either way, once."""
    given = vars(args)
    tag = given.pop("model_tag", None)
    if tag is not None:
        if given.get("model") not in (None, tag):
            raise UsageError(
                Diagnostic(
                    "model-twice",
                    f"two models are named: {tag} and --model {given['model']}",
                    fix="name one",
                    exit_code=ExitCode.USAGE,
                )
            )
        given["model"] = tag
    return EngineArgs.from_cli_args(args)


def frontend_config(args: argparse.Namespace) -> FrontendConfig:
    """The server's settings of parsed flags."""
    names = {f.name for f in config_fields(FrontendConfig)}
    given: dict[str, Any] = {k: v for k, v in vars(args).items() if k in names}
    return FrontendConfig(**given)
