# SPDX-License-Identifier: Apache-2.0
"""What every platform shares: the model, its layers, the draft head."""
