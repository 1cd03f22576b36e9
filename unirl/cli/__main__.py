"""`python -m unirl.cli` is the command `unirl`."""

import sys

from unirl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
