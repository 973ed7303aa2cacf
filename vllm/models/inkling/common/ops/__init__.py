# SPDX-License-Identifier: Apache-2.0
"""Portable kernels that only Inkling needs."""
