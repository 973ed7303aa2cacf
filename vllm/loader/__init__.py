# SPDX-License-Identifier: Apache-2.0
"""Weights from files into a model on its device.

Belongs here: formats and how their tensors are read. Does not: what a tensor means, which
each model's `load_weights` knows. May import preflight's readers of headers and everything
left of `models`.
"""

from vllm.loader.load import load_model

__all__ = ["load_model"]
