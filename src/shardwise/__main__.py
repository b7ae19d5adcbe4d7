"""`python -m shardwise` is the command `shardwise`."""

import sys


def run() -> int:
    """Run the command line; Ctrl-C ends it in silence while modules are imported, too."""
    try:
        from shardwise.cli import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
