# SPDX-License-Identifier: Apache-2.0
"""Fused Triton kernels of the layers, each beside the plain-torch form that its layer has.

They are launched where a layer's tensors lie on a GPU; nothing here waits for the device, and
grids depend on shapes alone, so every launch can be captured in a CUDA graph.
"""
