# SPDX-License-Identifier: Apache-2.0
"""Attention backends: what each supports, and the choice. Torch-free, nothing is imported.

A backend answers with reasons against itself, so that an empty choice explains itself and
a forced backend that cannot work is refused with those that can.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Collection, Sequence

from vllm.errors import Diagnostic, ExitCode, UnsupportedHardwareError, UsageError
from vllm.platforms.interface import Device


@dataclasses.dataclass(frozen=True)
class AttentionNeeds:
    """What a model asks of attention, after sharding."""

    head_dims: frozenset[int]
    dtype: str
    """torch's name: bfloat16, float16, float32."""
    relative_bias: bool = False


@dataclasses.dataclass(frozen=True)
class AttentionBackend:
    """One implementation's declared support."""

    name: str
    device_types: frozenset[str]
    """cuda, rocm, cpu."""
    block_size: int
    """Default tokens a block of the KV cache."""
    block_sizes: tuple[int, ...]
    dtypes: frozenset[str]
    majors: frozenset[int] | None = None
    """Capability majors; None: all from 8 on (NVIDIA) or any (others)."""
    max_head_dim: int = 256
    head_dim_multiple: int = 1
    package: str | None = None
    """Module that must be installed."""
    distribution: str = ""

    def reasons_against(
        self, device_type: str, devices: Sequence[Device], needs: AttentionNeeds
    ) -> list[str]:
        """Why this backend cannot serve `needs` on these devices; [] if it can."""
        if device_type not in self.device_types:
            return [f"runs on {' and '.join(sorted(self.device_types))}, not on {device_type}"]
        reasons = [r for d in devices if (r := self._against_device(device_type, d))][:1]
        if needs.dtype not in self.dtypes:
            reasons.append(f"has no {needs.dtype}, only {', '.join(sorted(self.dtypes))}")
        for head_dim in sorted(needs.head_dims):
            if head_dim > self.max_head_dim or head_dim % self.head_dim_multiple:
                reasons.append(
                    f"head_dim {head_dim} is not a multiple of {self.head_dim_multiple} up to "
                    f"{self.max_head_dim}"
                )
        if self.package and not _is_installed(self.package):
            reasons.append(f"{self.distribution} is not installed")
        return reasons

    def _against_device(self, device_type: str, device: Device) -> str | None:
        capability = device.capability
        if capability is None or device_type != "cuda":
            return None
        if self.majors is None:
            if capability.major >= 7:
                return None
            return f"needs capability 7.0 or newer, GPU {device.index} has {capability}"
        if capability.major in self.majors:
            return None
        majors = ", ".join(f"{m}.x" for m in sorted(self.majors))
        return f"has kernels for {majors}, GPU {device.index} has {capability}"


FLASH_ATTN = AttentionBackend(
    "FLASH_ATTN",
    frozenset({"cuda"}),
    block_size=128,
    block_sizes=(128,),
    dtypes=frozenset({"bfloat16", "float16"}),
    majors=frozenset({9, 10, 11}),
    max_head_dim=128,
    head_dim_multiple=32,
    package="flash_attn.cute",
    distribution="flash-attn-4",
)
TRITON_ATTN = AttentionBackend(
    "TRITON_ATTN",
    frozenset({"cuda", "rocm"}),
    block_size=16,
    block_sizes=(16, 32, 64, 128),
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    package="triton",
    distribution="triton",
)
CPU_ATTN = AttentionBackend(
    "CPU_ATTN",
    frozenset({"cpu"}),
    block_size=16,
    block_sizes=(8, 16, 32, 64, 128),
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    max_head_dim=1024,
)
BACKENDS = {b.name: b for b in (FLASH_ATTN, TRITON_ATTN, CPU_ATTN)}

_PREFERENCE: dict[str, tuple[AttentionBackend, ...]] = {
    "cuda": (FLASH_ATTN, TRITON_ATTN),
    "rocm": (TRITON_ATTN,),
    "cpu": (CPU_ATTN,),
}
_RELATIVE_PREFERENCE: dict[str, tuple[AttentionBackend, ...]] = {
    # FA4 cannot split keys on Hopper: 3 % of the copy bandwidth at one long sequence.
    "cuda": (TRITON_ATTN, FLASH_ATTN),
    "rocm": (TRITON_ATTN,),
    "cpu": (CPU_ATTN,),
}


@dataclasses.dataclass(frozen=True)
class Selection:
    """The chosen backend and why the others were not taken."""

    backend: AttentionBackend
    rejected: dict[str, str]
    """Name to reason; a backend that could also be forced says "slower here"."""


def select_attention_backend(
    device_type: str,
    devices: Sequence[Device],
    needs: AttentionNeeds,
    requested: str | None = None,
) -> Selection:
    """The backend for `needs`; `device_type` is cuda, rocm or cpu.

    Raises `UsageError` for an unknown name and `UnsupportedHardwareError` for one that cannot
    work here, naming those that can.
    """
    order = (_RELATIVE_PREFERENCE if needs.relative_bias else _PREFERENCE)[device_type]
    against = {b.name: b.reasons_against(device_type, devices, needs) for b in BACKENDS.values()}
    possible = [b for b in order if not against[b.name]]
    if requested is not None:
        return _forced(requested.upper(), against, [b.name for b in possible])
    if not possible:
        raise _refused(f"no attention backend can run this model on {device_type}", against, [])
    rejected = {
        name: "; ".join(reasons) or f"{possible[0].name} is preferred here"
        for name, reasons in against.items()
        if name != possible[0].name
    }
    return Selection(possible[0], rejected)


def _forced(name: str, against: dict[str, list[str]], possible: list[str]) -> Selection:
    if name not in BACKENDS:
        raise UsageError(
            Diagnostic(
                "attention-backend-unknown",
                f"--attention-backend {name} is not an attention backend",
                fix=f"one of {', '.join(possible or BACKENDS)}, or leave the choice to the engine",
                exit_code=ExitCode.USAGE,
            )
        )
    if against[name]:
        raise _refused(
            f"--attention-backend {name} cannot run here", {name: against[name]}, possible
        )
    rejected = {n: "; ".join(r) or f"{name} was asked for" for n, r in against.items() if n != name}
    return Selection(BACKENDS[name], rejected)


def _refused(
    subject: str, against: dict[str, list[str]], possible: Collection[str]
) -> UnsupportedHardwareError:
    return UnsupportedHardwareError(
        Diagnostic(
            "attention-backend",
            subject,
            why="; ".join(f"{name}: {'; '.join(r)}" for name, r in against.items() if r),
            fix=f"--attention-backend {' or '.join(possible)}" if possible else "--device cpu",
            exit_code=ExitCode.HARDWARE,
        )
    )


def _is_installed(module: str) -> bool:
    """Whether a module can be found; parents are looked at, nothing is imported."""
    root = module.partition(".")[0]
    spec = importlib.util.find_spec(root)
    if spec is None or root == module:
        return spec is not None
    path = module.removeprefix(root).replace(".", "/")
    import os

    return any(
        os.path.exists(location + path) or os.path.exists(f"{location}{path}.py")
        for location in spec.submodule_search_locations or ()
    )
