"""`python -m kernels.cpu build`: compiles the native decoder ahead of its first use."""

from __future__ import annotations

import argparse
import logging
import sys

from kernels.cpu.build import ISA_FLAGS, BuildError, detect_isa, find_or_build


def main() -> int:
    """Builds for the named instruction sets and prints the libraries' paths."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="compile the native decoder")
    build.add_argument(
        "--isa",
        nargs="+",
        choices=sorted(ISA_FLAGS),
        default=[detect_isa()],
        help="instruction sets to build for (default: this machine's best)",
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        for isa in arguments.isa:
            print(find_or_build(isa))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
