"""`python -m dbench` is the dbench command."""

from dbench.cli import main

if __name__ == "__main__":
    main()
