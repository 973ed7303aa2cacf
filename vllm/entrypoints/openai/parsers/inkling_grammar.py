# SPDX-License-Identifier: Apache-2.0
"""Structured output in Inkling's form: what is constrained is the text block.

    answer = [thinking block] <|content_text|> constrained text <|end_message|>

A constraint on the bare text would forbid the markers that the model was trained to write.
"""

from __future__ import annotations

import json
import re

from vllm.sampling_params import StructuredOutputsParams

_FRAME = """start: <|message_model|>? thought? <|content_text|> answer <|end_message|>
thought: <|content_thinking|> /(?s:.*)/ <|end_message|> <|message_model|>
answer: """


def framed(constraint: StructuredOutputsParams) -> StructuredOutputsParams:
    """The constraint with the format around it. Raises `RequestError` where it is none itself.

    A grammar is left as it is: it may name the markers.
    """
    from vllm.sampling.structured import JSON_OPTIONS, check_constraint

    check_constraint(constraint)
    if constraint.grammar is not None:
        return constraint
    if constraint.regex is not None:
        escaped = re.sub(r"\\.|/|\n", _escaped, constraint.regex, flags=re.DOTALL)
        rule = f"/{escaped}/"
    elif constraint.choice is not None:
        rule = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in constraint.choice)
    else:
        given = {"type": "object"} if constraint.json is None else constraint.json
        schema = json.loads(given) if isinstance(given, str) else given
        if isinstance(schema, dict):
            schema = {"x-guidance": JSON_OPTIONS, **schema}
        rule = f"%json {json.dumps(schema)}"
    return StructuredOutputsParams(grammar=_FRAME + rule)


def _escaped(found: re.Match[str]) -> str:
    """Part of a regular expression as it stands between slashes in a Lark grammar."""
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])
