"""`python -m nnlo_common` is the `nnlo` command."""

from __future__ import annotations

import sys

from nnlo_common.commands._cli import main

if __name__ == "__main__":
    sys.exit(main())
