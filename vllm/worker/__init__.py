# SPDX-License-Identifier: Apache-2.0
"""The device side: executor, model runner, batch state, CUDA graphs."""
