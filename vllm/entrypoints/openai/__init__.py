# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible HTTP server. Never imports torch or transformers.

`server.run_server` starts the engine core first and imports the HTTP stack meanwhile.
Requests are msgspec structs (`protocol`); answers are plain dicts, encoded by msgspec.
"""
