# SPDX-License-Identifier: Apache-2.0
"""What preflight found and planned, for people and for machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vllm.errors import Diagnostic, ExitCode, error_from

GiB = 1 << 30
SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the model would run; bytes are per device."""

    model: str
    architecture: str
    platform: str
    devices: tuple[str, ...]
    dtype: str
    quantization: str | None
    tensor_parallel_size: int
    attention_backends: dict[str, str]
    """Layer kind (full, sliding) to backend name."""
    weight_bytes: int | None
    activation_bytes: int | None
    kv_bytes: int | None
    kv_bytes_per_token: int | None
    kv_tokens: int | None
    full_sequences: float | None
    max_model_len: int
    memory_total: int | None
    memory_budget: int | None
    decode_ceiling_tokens_per_s: float | None
    """Memory bandwidth over the bytes that a token reads, one sequence, empty cache."""


@dataclasses.dataclass(frozen=True)
class PreflightReport:
    """Findings, worst first, and the plan where none of them is an error."""

    findings: tuple[Diagnostic, ...]
    plan: Plan | None

    @property
    def exit_code(self) -> ExitCode:
        """0, or what the worst finding asks for."""
        errors = [d for d in self.findings if d.severity == "error"]
        return errors[0].exit_code if errors else ExitCode.OK

    def raise_for_errors(self) -> None:
        """Raise the `VLLMError` subclass of the worst finding, carrying all; or return."""
        if self.exit_code != ExitCode.OK:
            raise error_from(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON form (docs/usage/preflight.md)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "exit_code": int(self.exit_code),
            "findings": [
                {**dataclasses.asdict(d), "exit_code": int(d.exit_code)} for d in self.findings
            ],
            "plan": dataclasses.asdict(self.plan) if self.plan else None,
        }

    def render_plan(self) -> str:
        """The plan as aligned lines. Only where there is one."""
        assert self.plan is not None
        return _render_plan(self.plan)


def _render_plan(plan: Plan) -> str:
    kinds = ", ".join(f"{kind}: {name}" for kind, name in plan.attention_backends.items())
    rows = [
        ("model", plan.model),
        ("architecture", plan.architecture),
        ("devices", _grouped(plan.devices)),
        ("dtype", plan.dtype + (f", weights {plan.quantization}" if plan.quantization else "")),
        ("attention", kinds),
        ("weights", _gib(plan.weight_bytes)),
        ("activations", _gib(plan.activation_bytes, about=True)),
        ("KV cache", _render_kv(plan)),
        ("fits", _render_fit(plan)),
        ("decode ceiling", _render_ceiling(plan)),
    ]
    return "\n".join(f"{label:>15}  {text}" for label, text in rows)


def _grouped(names: Sequence[str]) -> str:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{n}x {name}" if n > 1 else name for name, n in counts.items())


def _gib(size: int | None, about: bool = False) -> str:
    if size is None:
        return "unknown"
    text = f"{size / GiB:.2f} GiB" if size >= GiB // 10 else f"{size / (1 << 20):.1f} MiB"
    return f"{'about ' if about else ''}{text} per device"


def _render_kv(plan: Plan) -> str:
    if plan.kv_bytes is None or plan.kv_bytes_per_token is None:
        return "unknown (the device's memory cannot be told)"
    return f"{_gib(plan.kv_bytes)}, {plan.kv_bytes_per_token / 1024:.1f} KiB a token"


def _render_fit(plan: Plan) -> str:
    if plan.kv_tokens is None or plan.full_sequences is None:
        return "unknown"
    return (
        f"about {plan.kv_tokens:,} tokens, {plan.full_sequences:.1f} sequences of "
        f"{plan.max_model_len:,}"
    )


def _render_ceiling(plan: Plan) -> str:
    if plan.decode_ceiling_tokens_per_s is None:
        return "unknown (this device's memory bandwidth is not on record)"
    return f"{plan.decode_ceiling_tokens_per_s:,.0f} tokens/s for one sequence"
