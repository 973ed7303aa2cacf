# SPDX-License-Identifier: Apache-2.0
"""What every test runs under: threads, no hub, Triton's interpreter where there is no GPU.

The environment is set here at import, before any test imports torch or triton; both read it
once. Child processes inherit it.
"""

from __future__ import annotations

import functools
import glob
import os

import pytest


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


os.environ.setdefault("OMP_NUM_THREADS", str(_usable_cores()))
# Tests make their checkpoints; a look-up on a hub would be a mistake, and slow to fail.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_GPU_NODES = glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/kfd")
if not _GPU_NODES:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@functools.cache
def no_gpu_reason() -> str | None:
    """Why GPU tests cannot run here, or None. Asks torch only where a device node exists."""
    if not _GPU_NODES:
        return "needs a GPU: this machine has no /dev/nvidia* and no /dev/kfd"
    import torch

    if not torch.cuda.is_available():
        return f"needs a GPU: torch {torch.__version__} cannot use the one of this machine"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and (reason := no_gpu_reason()):
            item.add_marker(pytest.mark.skip(reason=reason))
