# SPDX-License-Identifier: Apache-2.0
"""What the chip behind a tensor is and can do, as far as launches depend on it."""

from __future__ import annotations

import functools

import torch

INTERPRETER = "cpu"
"""Name of the "chip" when Triton interprets kernels on CPU tensors."""

SHARED_MEMORY_BYTES = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_103": 227 * 1024,
    "sm_110": 227 * 1024,
    "sm_120": 99 * 1024,
    "sm_121": 99 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}
"""Most shared memory that one block may opt into (CUDA programming guide, CDNA ISA guides)."""


def device_arch(device: torch.device) -> str:
    """Name of the chip behind `device`: "sm_90", "gfx942", or INTERPRETER for the CPU."""
    if device.type != "cuda":
        return INTERPRETER
    return _cuda_arch(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _cuda_arch(index: int) -> str:
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(index).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def has_dependent_launch(arch: str) -> bool:
    """Whether a kernel may be launched before the one that it waits for has ended."""
    return arch in ("sm_90", "sm_100", "sm_103")


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that waits itself (`gdc_wait`) for the one before it.

    Its launch overlaps the end of that one. DEPENDENT tells the kernel.
    """
    dependent = has_dependent_launch(device_arch(device))
    return {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of `device`; 2 under the interpreter, so that splits are exercised."""
    if device.type != "cuda":
        return 2
    return _cuda_multiprocessors(
        torch.cuda.current_device() if device.index is None else device.index
    )


@functools.cache
def _cuda_multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
