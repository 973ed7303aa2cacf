# SPDX-License-Identifier: Apache-2.0
"""No white space in file names: shell scripts and Makefiles would split them."""

from __future__ import annotations

import sys


def main() -> int:
    """Name the files with white space in their path; 1 if there are any."""
    bad = [path for path in sys.argv[1:] if path != "".join(path.split())]
    for path in bad:
        print(f"{path!r}: white space in a file name")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
