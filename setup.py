# SPDX-License-Identifier: Apache-2.0
"""Pure Python unless asked: VLLM_BUILD_TML_FA4=1 lets CMake fetch and place the FA4 sources."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from setuptools import setup
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


setup(cmdclass={"build_py": BuildWithCMake})
