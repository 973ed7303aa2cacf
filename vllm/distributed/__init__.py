# SPDX-License-Identifier: Apache-2.0
"""Process groups and collectives."""
