# SPDX-License-Identifier: Apache-2.0
"""What every format gives the loader: names beforehand, tensors one after the other."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator

import torch

NamedTensors = Iterator[tuple[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class WeightSource:
    """A checkpoint, opened but not read."""

    names: tuple[str, ...]
    """Tensors in the checkpoint's spelling, in the order they will come."""
    tensors: Callable[[], NamedTensors]
    """Reads them; each may be a view of a mapped file, valid until the next one."""


def with_progress(source: WeightSource, shown: bool) -> NamedTensors:
    """The source's tensors, counted in a progress bar if `shown` and stderr is a terminal."""
    if not shown or not sys.stderr.isatty():
        yield from source.tensors()
        return
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(source.tensors(), "Loading weights", total=len(source.names), console=console)
