# SPDX-License-Identifier: Apache-2.0
"""The `vllm` command, one file a subcommand."""
