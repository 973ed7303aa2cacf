# SPDX-License-Identifier: Apache-2.0
"""Logging to stderr; `VLLM_LOGGING_LEVEL` sets the level."""

from __future__ import annotations

import functools
import logging
import sys

from vllm import envs

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_ROOT = "vllm"


@functools.cache
def _configure() -> None:
    root = logging.getLogger(_ROOT)
    if root.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%m-%d %H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(envs.VLLM_LOGGING_LEVEL)
    root.propagate = False


def init_logger(name: str) -> logging.Logger:
    """The logger for a module (`init_logger(__name__)`), writing to stderr."""
    _configure()
    return logging.getLogger(name)
