"""`python -m sbpc` is `sbpc`."""

import sys

from sbpc.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
