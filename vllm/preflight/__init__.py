# SPDX-License-Identifier: Apache-2.0
"""What can be known before a byte of weights is loaded: files, memory, environment."""

from vllm.preflight.report import Plan, PreflightReport
from vllm.preflight.run import run

__all__ = ["Plan", "PreflightReport", "run"]
