# SPDX-License-Identifier: Apache-2.0
"""What can be known before a byte of weights is loaded."""
