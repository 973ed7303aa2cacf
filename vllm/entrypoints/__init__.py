# SPDX-License-Identifier: Apache-2.0
"""Where users come in: the command line, `LLM`, the OpenAI-compatible server.

Nothing imports this package. `cli` stays before the torch line; `openai` never imports torch.
"""
