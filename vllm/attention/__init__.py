# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged cache: metadata, kernels, backends."""
