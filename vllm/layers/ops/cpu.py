# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels of the CPU backend (csrc/cpu), where they were built.

They are compiled when the package is installed from source and called through ctypes; they
run on torch's own OpenMP threads, since torch is loaded first and both name the same library.
"""

from __future__ import annotations

import ctypes
import functools
import glob
from pathlib import Path
from typing import Any

import torch

_PACKAGE = Path(__file__).resolve().parents[2]
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""What the kernels compute in, by the number they know it by."""


@functools.cache
def cpu_kernels() -> Any:
    """The shared library, or None where no compiler was there to build it."""
    found = glob.glob(str(_PACKAGE / "_cpu_kernels*.so"))
    if not found:
        return None
    library = ctypes.CDLL(found[0])
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.vllm_attention_lanes.restype = size
    for name, arguments in {
        "vllm_paged_attention": [*[pointer] * 9, ctypes.c_float],
        "vllm_rms_norm": [*[pointer] * 4, *[size] * 5, ctypes.c_float],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_int, *arguments], None
    return library


def has_kernels(dtype: torch.dtype) -> bool:
    """Whether the kernels were built, and compute in `dtype`."""
    return dtype in DTYPES and cpu_kernels() is not None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; x is (n, size) or (n, heads, size).

    With `residual` (dense, like x) it first becomes residual + x, in place. The result is dense.
    """
    heads = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype)
    cpu_kernels().vllm_rms_norm(
        DTYPES[x.dtype],
        out.data_ptr(),
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        x.shape[0] * heads,
        heads,
        x.shape[-1],
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        eps,
    )
    return out
