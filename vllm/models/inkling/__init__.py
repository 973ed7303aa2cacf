# SPDX-License-Identifier: Apache-2.0
"""Inkling (Thinking Machines): text backbone and draft head.

One model definition in `common/`; a vendor folder holds only what differs. `configs` and
`layout` are torch-free and serve the front end, so the classes are imported on first use.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("InklingForCausalLM", "InklingForConditionalGeneration", "InklingMTPModel"):
        from vllm.models.inkling.common import model

        return getattr(model, name)
    raise AttributeError(name)
