"""All benchmarks, each in its own process: python -m benchmarks [--quick]."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

COMMANDS = (
    "plan",
    "candidates",
    "first_step",
    "initial_values",
    "step",
    "moe",
    "scale",
    "torch_step",
    "checkpoint",
    "checkpoint_pause",
    "checkpoint_scale",
    "checkpoint_exchange",
    "checkpoint_store",
    "conversion",
    "calibration",
    "gpu",
    "gpu_modules",
    "module_host",
)
SHARING = {"step", "moe", "scale"}
"""Commands that time some of the same programs, and never their compilation."""


def main() -> int:
    """Run all; 1 if one of them failed."""
    with tempfile.TemporaryDirectory() as compiled:
        return run_all(compiled)


def run_all(compiled: str) -> int:
    """Run all, with a folder for the compilation cache."""
    failed = []
    for name in COMMANDS:
        started = time.perf_counter()
        print(f"\n$ python -m benchmarks.{' '.join([name, *sys.argv[1:]])}", flush=True)
        cache = {"JAX_COMPILATION_CACHE_DIR": compiled} if name in SHARING else {}
        command = [sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]]
        if subprocess.run(command, env={**os.environ, **cache}, check=False).returncode:
            failed.append(name)
        print(f"({time.perf_counter() - started:.0f} s)", flush=True)
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
