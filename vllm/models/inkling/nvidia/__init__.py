# SPDX-License-Identifier: Apache-2.0
"""What only NVIDIA GPUs have: the FA4 kernels and the constructor's check for them."""
