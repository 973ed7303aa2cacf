# SPDX-License-Identifier: Apache-2.0
"""mypy over the whole package, with the types of the packages that .venv holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """mypy's exit status."""
    command = [sys.executable, "-m", "mypy"]
    for python in (
        Path(".venv/bin/python"),
        Path(os.environ.get("VIRTUAL_ENV", "") or ".", "bin/python"),
    ):
        if python.exists():
            # torch is not in the hook's own environment.
            command += ["--python-executable", str(python)]
            break
    return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main())
