# SPDX-License-Identifier: Apache-2.0
"""Building blocks of models, sharded over tensor-parallel ranks.

Belongs here: modules that several architectures share, and their fast kernels (`ops/`).
Does not: an architecture's oddities. May import config, platforms, distributed, attention.
"""
