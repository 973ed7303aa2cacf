# SPDX-License-Identifier: Apache-2.0
"""Flags and `EngineArgs`, both generated from the fields of the config dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from vllm.config.attention import AttentionConfig
from vllm.config.cache import CacheConfig
from vllm.config.compilation import CompilationConfig
from vllm.config.device import DeviceConfig
from vllm.config.fields import field_docs, flag_of
from vllm.config.load import LoadConfig
from vllm.config.model import ModelConfig, parse_length
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.config.vllm import VllmConfig
from vllm.errors import Diagnostic, ExitCode, UsageError
from vllm.platforms import set_platform

ENGINE_CONFIGS: tuple[type, ...] = (
    ModelConfig,
    LoadConfig,
    DeviceConfig,
    ParallelConfig,
    CacheConfig,
    SchedulerConfig,
    AttentionConfig,
    CompilationConfig,
    StructuredOutputsConfig,
)
_LENGTHS = ("--max-model-len", "--max-num-batched-tokens", "--kv-cache-memory-bytes")


def config_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """The fields of a config class that are flags."""
    return [f for f in dataclasses.fields(cls) if f.init and f.metadata.get("cli", True)]


def _argument_name(field: dataclasses.Field[Any]) -> str:
    """The keyword of `EngineArgs` and `LLM`: the flag's, as in vLLM."""
    return flag_of(field).removeprefix("--").replace("-", "_")


class EngineArgs:
    """Every engine setting by its flag's name, such as `tensor_parallel_size`.

    Unknown names raise `UsageError` with the nearest ones.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        self.speculative_config = settings.pop("speculative_config", None)
        known = {_argument_name(f): f for cls in ENGINE_CONFIGS for f in config_fields(cls)}
        for name in settings:
            if name not in known:
                raise UsageError(_unknown_name(name, list(known)))
        self.settings: dict[str, Any] = {"model": model, **settings}

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every setting."""
        for config in ENGINE_CONFIGS:
            add_config_args(parser, config)
        parser.add_argument(
            "--speculative-config",
            type=_json_object,
            default=argparse.SUPPRESS,
            metavar="JSON",
            help='Speculative decoding: \'{"method": "mtp", "num_speculative_tokens": 2}\'.',
        )
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """From parsed flags; what was not given keeps its default."""
        names = {_argument_name(f) for config in ENGINE_CONFIGS for f in config_fields(config)}
        names.add("speculative_config")
        given = {k: v for k, v in vars(args).items() if k in names}
        return cls(**given)

    def create_engine_config(
        self, planned_devices: tuple[Any, ...] | None = None, defer_errors: bool = False
    ) -> VllmConfig:
        """Resolve and check everything. Raises `VLLMError`.

        With `defer_errors`, errors that leave a usable configuration stay in its `findings`,
        so that preflight can report them together with its own.
        """
        parts = {cls: self._part(cls) for cls in ENGINE_CONFIGS if cls is not ModelConfig}
        device: Any = parts[DeviceConfig]
        device.planned_devices = planned_devices
        if planned_devices is None and device.device != "auto":
            set_platform(device.platform)
        speculative = self.speculative_config
        findings: list[Diagnostic] = []
        parallel: Any = parts[ParallelConfig]
        attention: Any = parts[AttentionConfig]
        load: Any = parts[LoadConfig]
        model_config = ModelConfig(
            **self._values(ModelConfig),
            attention_backend=attention.backend,
            num_devices=parallel.world_size,
            platform=device.platform,
            download_dir=load.download_dir,
            findings=findings,
        )
        config = VllmConfig(
            model_config,
            parts[CacheConfig],
            parallel,
            parts[SchedulerConfig],
            parts[LoadConfig],
            device,
            attention,
            parts[CompilationConfig],
            None if speculative is None else SpeculativeConfig.from_json(speculative),
            parts[StructuredOutputsConfig],
            findings,
        )
        if not defer_errors:
            config.raise_for_errors()
        return config

    def _values(self, cls: type) -> dict[str, Any]:
        return {
            f.name: self.settings[_argument_name(f)]
            for f in config_fields(cls)
            if _argument_name(f) in self.settings
        }

    def _part(self, cls: type) -> Any:
        return cls(**self._values(cls))


class AsyncEngineArgs(EngineArgs):
    """The server's settings; the same ones."""


def _unknown_name(name: str, known: Sequence[str]) -> Diagnostic:
    near = difflib.get_close_matches(name, known, n=3)
    return Diagnostic(
        "unknown-argument",
        f"there is no engine argument {name!r}",
        why=f"nearest: {', '.join(near)}" if near else "",
        fix="see docs/configuration/engine_args.md",
        exit_code=ExitCode.USAGE,
    )


def add_config_args(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add a flag for each field of a config class, in a group of its own."""
    group = parser.add_argument_group((cls.__doc__ or cls.__name__).splitlines()[0].rstrip("."))
    hints = typing.get_type_hints(cls)
    docs = field_docs(cls) if _wants_help() else {}
    for field in config_fields(cls):
        _add_field(group, field, hints[field.name], docs.get(field.name, ""))


def _wants_help() -> bool:
    return any(a in ("-h", "--help") or a.startswith("--help=") for a in sys.argv[1:])


def _add_field(group: Any, field: dataclasses.Field[Any], hint: Any, doc: str) -> None:
    flag = flag_of(field)
    names = [*field.metadata.get("aliases", ()), flag]
    options: dict[str, Any] = {
        "dest": _argument_name(field),
        "default": argparse.SUPPRESS,
        "help": _with_default(doc, field).replace("%", "%%"),
    }
    kinds = typing.get_args(hint) if _is_union(hint) else (hint,)
    kind = next(k for k in kinds if k is not type(None))
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(kind) is list:
        options |= {"nargs": "+", "type": typing.get_args(kind)[0]}
    elif typing.get_origin(kind) is dict:
        options |= {"type": _json_object, "metavar": "JSON"}
    else:
        options["type"] = _length if flag in _LENGTHS else kind
        if choices := field.metadata.get("choices"):
            options["choices"] = list(choices)
    group.add_argument(*names, **options)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _with_default(doc: str, field: dataclasses.Field[Any]) -> str:
    default = field.default
    if default is dataclasses.MISSING or default in (None, ""):
        return doc
    return f"{doc} (default: {default})"


def _length(text: str) -> int:
    try:
        return parse_length(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error.findings[0].fix}") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text.encode(), type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not a JSON object: {error}") from None


class FlexibleArgumentParser(argparse.ArgumentParser):
    """argparse that takes --a_b for --a-b and tells errors as findings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([_dashed(a) for a in given], namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._unknown(unknown)
        return parsed

    def error(self, message: str) -> NoReturn:
        raise UsageError(
            Diagnostic(
                "usage",
                message,
                where=self.prog,
                fix=f"see {self.prog} --help",
                exit_code=ExitCode.USAGE,
            )
        )

    def _unknown(self, unknown: list[str]) -> NoReturn:
        flags = [a.partition("=")[0] for a in unknown if a.startswith("-")] or unknown
        known = [o for action in self._actions for o in action.option_strings]
        near = difflib.get_close_matches(flags[0], known, n=2, cutoff=0.6)
        what = "option" if flags[0].startswith("-") else "argument"
        raise UsageError(
            Diagnostic(
                "unknown-option",
                f"{self.prog} has no {what} {', '.join(flags[:3])}",
                fix=f"did you mean {' or '.join(near)}?" if near else f"see {self.prog} --help",
                exit_code=ExitCode.USAGE,
            )
        )


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


def _dashed(argument: str) -> str:
    if not argument.startswith("--") or len(argument) == 2:
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value
