# SPDX-License-Identifier: Apache-2.0
"""What travels between a front end and a core in its own process.

Each message is two ZMQ frames, a tag and a msgpack body. Torch-free: the API server
speaks it too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from vllm.errors import Diagnostic

# Front end -> core
ADD = b"A"  # EngineCoreRequest
ABORT = b"X"  # list of request ids
RESET_PREFIX_CACHE = b"P"  # call id
SHUTDOWN = b"S"  # empty

# Core -> front end
READY = b"R"  # CoreReady
OUTPUTS = b"O"  # EngineCoreOutputs
REPLY = b"Y"  # [call id, result]
HEARTBEAT = b"H"  # empty; while idle
FAILURE = b"F"  # CoreFailure; the last message


@dataclasses.dataclass
class LaunchSpec:
    """What the process is told on its standard input, pickled.

    The pipe stays open: its end tells the core that the front end is gone.
    """

    make_core: Callable[[Any], Any]
    """Called with the configuration; gives the `EngineCore`."""
    vllm_config: object
    directory: str
    """Holds the sockets; removed by whoever ends last."""

    @property
    def input_address(self) -> str:
        """Front end -> core."""
        return f"ipc://{self.directory}/input"

    @property
    def output_address(self) -> str:
        """Core -> front end."""
        return f"ipc://{self.directory}/output"


class CoreReady(msgspec.Struct, gc=False):
    """The core is warmed up and serves."""

    pid: int
    block_size: int
    num_blocks: list[int]
    """For each KV cache group, the null block included."""
    max_sequence_tokens: int
    """Longest sequence that the KV cache holds."""


class CoreFailure(msgspec.Struct, gc=False):
    """Why the core ends: the root cause, in the form of a finding."""

    findings: list[Diagnostic]
    exception: str = ""
    """Name of the exception class in vllm.errors, or empty for a defect."""


encode = msgspec.msgpack.Encoder().encode
