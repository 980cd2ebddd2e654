"""`python -m flopwise`: the same as the `flopwise` command."""

from __future__ import annotations

import sys

from flopwise.cli import main

if __name__ == "__main__":
    sys.exit(main())
