# SPDX-License-Identifier: Apache-2.0
"""Development tools; nothing here is installed with the package."""
