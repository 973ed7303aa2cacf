# SPDX-License-Identifier: Apache-2.0
"""Generate text in this process, without a server: `python examples/offline_generate.py`."""

from __future__ import annotations

from vllm import LLM, SamplingParams


def main() -> None:
    """Two prompts, answered in one batch by the embedded model."""
    prompts = ["The capital of France is", "Water boils at"]
    params = SamplingParams(temperature=0, max_tokens=24)
    for output in LLM().generate(prompts, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
