# SPDX-License-Identifier: Apache-2.0
"""The JSON schema in the documentation is that of the report."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from vllm.errors import Diagnostic
from vllm.preflight.report import SCHEMA_VERSION, Plan, PreflightReport

PAGE = Path(__file__).parents[2] / "docs" / "usage" / "preflight.md"


def test_the_documented_keys_are_those_of_the_report() -> None:
    (text,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    schema = json.loads(text)["properties"]
    report = PreflightReport((Diagnostic("a-code", "subject"),), None).to_dict()
    assert set(schema) == set(report)
    assert schema["schema_version"] == {"const": SCHEMA_VERSION}
    assert set(schema["findings"]["items"]["properties"]) == set(report["findings"][0])
    assert set(schema["plan"]["properties"]) == {f.name for f in dataclasses.fields(Plan)}
