# SPDX-License-Identifier: Apache-2.0
"""What the server tells about itself: counters and times under vLLM's Prometheus names.

`stats` is plain data filled by the output processor; `prometheus` and `log` show it.
prometheus_client is imported inside functions.
"""
