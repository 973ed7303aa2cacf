# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels of the CPU backend, and what CMake fetches when asked.

The kernels are built for this machine's processor (VLLM_CPU_ARCH names another one). Where no
compiler is there, the package installs without them and attention runs in torch operations.
VLLM_BUILD_TML_FA4=1 lets CMake fetch and place the FlashAttention 4 sources.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithCMake(build_py):
    """Adds what CMake installs to the built package."""

    def run(self) -> None:
        super().run()
        if os.environ.get("VLLM_BUILD_TML_FA4", "0") not in ("", "0"):
            build = str(Path(self.build_lib).resolve().with_name("cmake"))
            configure = ["cmake", "-S", str(ROOT), "-B", build, "-DVLLM_BUILD_TML_FA4=ON"]
            subprocess.check_call(configure)
            prefix = str(Path(self.build_lib).resolve())
            subprocess.check_call(["cmake", "--install", build, "--prefix", prefix])


CPU_KERNELS = Extension(
    "vllm._cpu_kernels",
    [f"csrc/cpu/{name}.cpp" for name in ("paged_attention", "norm", "rotary", "elementwise")],
    depends=["csrc/cpu/numbers.h", "csrc/cpu/norm.h"],
    extra_compile_args=[
        "-O3",
        "-std=c++17",
        "-fno-strict-aliasing",
        "-fopenmp",
        "-fno-math-errno",
        "-fno-trapping-math",
        f"-march={os.environ.get('VLLM_CPU_ARCH', 'native')}",
    ],
    extra_link_args=["-fopenmp"],
    optional=True,
)

setup(cmdclass={"build_py": BuildWithCMake}, ext_modules=[CPU_KERNELS])
