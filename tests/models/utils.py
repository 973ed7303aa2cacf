# SPDX-License-Identifier: Apache-2.0
"""What tests that walk the registered architectures share."""

from __future__ import annotations

import pytest

from vllm.errors import UnsupportedModelError
from vllm.platforms import current_platform


def skip_if_capability_restricted(architecture: str, attention_backend: str | None = None) -> None:
    """Skip the calling test, with the refusal as its reason, where this GPU cannot run it."""
    try:
        current_platform.verify_model_arch(architecture, attention_backend)
    except UnsupportedModelError as error:
        pytest.skip(str(error))
