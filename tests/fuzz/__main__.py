"""`python -m tests.fuzz --calls N [--seed S]`: random calls and frames at a real scheduler."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from shared.model_files import read_model_spec
from tests.api.tiny_model import write_tiny_model
from tests.fuzz.run import fuzz


def main() -> int:
    """Prints what came of the calls; the exit status tells whether all is well."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-fuzz-") as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        report = asyncio.run(fuzz(model, read_model_spec(model), args.seed, args.calls))
    for outcome, count in sorted(report.outcomes.items()):
        print(f"{outcome:40} {count:6}")
    print(f"{args.calls} calls, seed {args.seed}: memory grew by {report.growth_mib:.1f} MiB")
    for when, load in zip(("warm", "at the end"), report.loads, strict=True):
        print(f"{when}: {load}")
    for failure in report.failures[:50]:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
