# SPDX-License-Identifier: Apache-2.0
"""The front end asks the platform as soon as it knows the architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.nvml_stub import run_python

_BUILD = """
import sys
from vllm.config import ModelConfig
from vllm.errors import VLLMError
try:
    ModelConfig({path!r}, attention_backend={backend!r}, num_devices={ranks})
except VLLMError as error:
    print(type(error).__name__, error.findings[0].code, "torch" in sys.modules)
"""


def outcome(path: Path, machine: str, backend: str | None = None, ranks: int = 2) -> str:
    code = _BUILD.format(path=str(path), backend=backend, ranks=ranks)
    return run_python(code, machine, VLLM_LOGGING_LEVEL="ERROR")


@pytest.mark.parametrize("nested", [False, True], ids=["top level", "text_config"])
def test_platform_rejects_unsupported_arch_during_config(tmp_path: Path, nested: bool) -> None:
    # No size is in config.json: reading on would end in another error than the platform's.
    config: dict[str, object] = {"architectures": ["InklingForConditionalGeneration"]}
    config |= {"model_type": "inkling_mm_model"} | ({"text_config": {}} if nested else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused = "UnsupportedModelError unsupported-gpu False"
    for machine in ("2x RTX PRO 6000", "H100 + RTX PRO 6000", "RTX PRO 6000 + H100", "GB10"):
        assert outcome(tmp_path, machine) == refused
    read_on = "ConfigError config-value False"
    assert outcome(tmp_path, "2x H200") == read_on
    assert outcome(tmp_path, "driver mismatch") == read_on
    assert outcome(tmp_path, "2x RTX PRO 6000", "TRITON_ATTN") == read_on
    assert outcome(tmp_path, "H100 + RTX PRO 6000", ranks=1) == read_on
