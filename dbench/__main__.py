"""`python -m dbench` is the dbench command."""

import sys

from dbench.cli import main

if __name__ == "__main__":
    sys.exit(main())
