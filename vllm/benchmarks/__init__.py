# SPDX-License-Identifier: Apache-2.0
"""What `vllm bench` runs."""

from vllm.benchmarks.offline import latency, startup, throughput
from vllm.benchmarks.serving import serve

BENCHMARKS = {
    "throughput": throughput,
    "latency": latency,
    "startup": startup,
    "serve": serve,
}
