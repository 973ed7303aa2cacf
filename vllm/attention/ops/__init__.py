# SPDX-License-Identifier: Apache-2.0
"""Paged attention as plain functions on tensors: the reference and the portable Triton kernels.

Here belong kernels, their launchers and the facts that choose their block sizes. What a
layer or a backend decides does not. Imports torch and triton only.
"""
