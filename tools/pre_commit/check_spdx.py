# SPDX-License-Identifier: Apache-2.0
"""Source files start with their licence, after a `#!` line if there is one."""

from __future__ import annotations

import sys
from pathlib import Path

HEADER = "SPDX-License-Identifier: Apache-2.0"


def has_header(text: str) -> bool:
    """Is the licence named in the first two lines? An empty file needs none."""
    return not text.strip() or any(HEADER in line for line in text.splitlines()[:2])


def main() -> int:
    """Name the files without a header; 1 if there are any."""
    missing = [p for p in sys.argv[1:] if not has_header(Path(p).read_text(encoding="utf-8"))]
    for path in missing:
        print(f"{path}:1: the first line must be '# {HEADER}'")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
