# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens: samplers, rejection of drafts, structured output."""
