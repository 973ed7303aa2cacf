# SPDX-License-Identifier: Apache-2.0
"""House rules that no published linter knows, each a small check over the syntax tree.

Run one as `python -m tools.pre_commit.NAME FILE...`. Standard library only.
"""
