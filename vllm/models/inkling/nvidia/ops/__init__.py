# SPDX-License-Identifier: Apache-2.0
"""Kernels that exist on NVIDIA GPUs alone."""
