"""`python -m flopwise`: the same as the `flopwise` command."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Python has put the working folder first: a statistics.py in there is the script's, not ours.
    if sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    from flopwise.cli import main

    sys.exit(main())
