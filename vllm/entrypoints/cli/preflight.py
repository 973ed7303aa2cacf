# SPDX-License-Identifier: Apache-2.0
"""`vllm preflight MODEL [any serve flag] [--device SPEC] [--json]`."""

from __future__ import annotations

import sys

import msgspec

from vllm import preflight
from vllm.entrypoints.cli.arguments import engine_args, engine_parser, frontend_config
from vllm.entrypoints.cli.serve import bind
from vllm.errors import Diagnostic, VLLMError
from vllm.platforms.gpus import parse_device_spec
from vllm.platforms.interface import Device
from vllm.preflight.report import PreflightReport

_KINDS = ("auto", "cuda", "rocm", "cpu")


def main(arguments: list[str]) -> int:
    """Print findings and the plan; the exit status is what `vllm serve` would end with."""
    parser = engine_parser("vllm preflight", __doc__ or "", with_server=True)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    for action in parser._actions:
        if action.dest == "device":
            action.choices = None
            action.help = 'also hardware that is not here: sm_120, sm_120:96GiB, 2xH200, "L4", cpu'
    args = parser.parse_args(arguments)
    as_json = vars(args).pop("json")
    try:
        report = _run(args)
    except VLLMError as error:
        report = PreflightReport(error.findings, None)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report.to_dict()), indent=2).decode())
    else:
        _print(report)
    return report.exit_code


def _run(args) -> PreflightReport:  # type: ignore[no-untyped-def]
    planned = _planned_devices(args)
    frontend = frontend_config(args)
    config = engine_args(args).create_engine_config(planned, defer_errors=True)
    port = [] if planned is not None else _check_port(frontend)
    return preflight.run(config, frontend, serve=True, found=port, download=False)


def _planned_devices(args) -> tuple[Device, ...] | None:  # type: ignore[no-untyped-def]
    spec = getattr(args, "device", "auto")
    if spec in _KINDS[:3]:
        return None
    if spec == "cpu":
        return None
    del args.device
    return parse_device_spec(spec)


def _check_port(frontend) -> list[Diagnostic]:  # type: ignore[no-untyped-def]
    try:
        bind(frontend).close()
    except VLLMError as error:
        return list(error.findings)
    return []


def _print(report: PreflightReport) -> None:
    for finding in report.findings:
        print(finding, file=sys.stderr)
    if report.plan is not None:
        print(report.render_plan())
