"""All benchmarks, each in a process of its own: python -m benchmarks [--quick]."""

from __future__ import annotations

import subprocess
import sys
import time

COMMANDS = ("plan", "first_step", "step", "moe", "scale", "gpu")


def main() -> int:
    """Run all; 1 where one of them failed."""
    failed = []
    for name in COMMANDS:
        started = time.perf_counter()
        print(f"\n$ python -m benchmarks.{' '.join([name, *sys.argv[1:]])}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]], check=False).returncode:
            failed.append(name)
        print(f"({time.perf_counter() - started:.0f} s)", flush=True)
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
