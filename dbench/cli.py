"""The terminal program: parse, one call, print."""


def main() -> None:
    """Run the command line."""
