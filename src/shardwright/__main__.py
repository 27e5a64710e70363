"""``python -m shardwright``: the command line, for launchers that start modules and where its script is not on the path."""

import sys


def run() -> int:
    """The command line of this process, and its exit code."""
    # Here, since the package itself loads no command.
    from shardwright.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
