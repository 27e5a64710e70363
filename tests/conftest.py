"""What every test runs under: simulated devices, no network, the same random choices, and its needs as a marker.

Nothing here imports a framework. All of it is environment variables, which JAX and transformers read when a test
first imports them; the processes that a test starts can be given a user's environment instead.
"""

from __future__ import annotations

import ast
import gc
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from shardwright.storage import asking

_AS_STARTED, _RECURSION = dict(os.environ), sys.getrecursionlimit()

ROOT = Path(__file__).parent.parent

# These programs run for seconds: half the time to make machine code of them is what counts. How they are partitioned,
# and so what they compute and move, stays as it is.
_QUICKLY = "--xla_backend_optimization_level=0"
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    # Later versions have no such flag, and an unknown one ends the process.
    _QUICKLY = f"--xla_cpu_use_fusion_emitters=false {_QUICKLY}"

# JAX reads these when it is imported. Eight devices share two cores here, where an all-reduce may wait long for its
# last device; a hang is still ended.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        _QUICKLY,
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=60",
        "--xla_cpu_collective_call_terminate_timeout_seconds=300",
    ]
).strip()
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

# No test reads from the network; without these, a missing file would be asked for at length.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
os.environ.update(_OFFLINE)

# Test processes run side by side; each computes with one thread, so that they do not fight for cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# PyTorch's compiler would start processes for a program or two.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

# Objects live long here, traced programs most of all: with Python's own numbers a fifteenth of the time goes into looking for cycles.
gc.set_threshold(50_000, 20, 100)

# The same cases on every run, and no time limit for one case on a busy machine.
# `pytest --hypothesis-profile=search` looks for new cases.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile("repeatable")

# The last of each are our own, which import what stands before them.
_FRAMEWORKS = {"jax", "shardwright.engine_jax", "tests.engine_jax", "tests.sameness"}
_PROCESSES = {"subprocess", "multiprocessing", "tests.engine_torch.ranks"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with what its file needs, where it does not say, and start the slow files first.

    Files are handed to whichever test process is free: with the short ones last, both end together.
    """
    for item in items:
        if not any(item.get_closest_marker(need) for need in ("pure", "devices", "processes", "gpu")):
            for need in _needs(item.path):
                item.add_marker(need)
    items.sort(key=lambda item: item.get_closest_marker("pure") is not None)


def pytest_runtest_teardown() -> None:
    """PyTorch's compiler raises it for the entire process, and so the depth to which a nested file can be read."""
    sys.setrecursionlimit(_RECURSION)


def pytest_collection_finish() -> None:
    """What the test files imported stays until the end: no later collection looks at it."""
    gc.collect()
    gc.freeze()


@cache
def _needs(path: Path) -> tuple[str, ...]:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imported.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    prefixes = {name[:stop] for name in imported for stop in _dots(name)}
    needs = [
        need for need, names in (("devices", _FRAMEWORKS), ("processes", _PROCESSES)) if not names.isdisjoint(prefixes)
    ]
    return tuple(needs) or ("pure",)


def _dots(name: str) -> list[int]:
    return [index for index, char in enumerate(name) if char == "."] + [len(name)]


@pytest.fixture(scope="session")
def user_environment() -> dict[str, str]:
    """The environment of a person who types a command: that of the tests without what is set above for JAX.

    `shardwright` and `python` are those of the environment that the tests run in, and machine code is made quickly.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), _AS_STARTED.get("PATH", "")])
    # A worker starts with what this file has set in the process that started it: a user has one device.
    as_started = re.sub(r"--xla_force_host_platform_device_count=\d+", "", _AS_STARTED.get("XLA_FLAGS", ""))
    flags = f"{as_started} {_QUICKLY}".strip()
    return {**_AS_STARTED, **_OFFLINE, "PATH": path, "TOKENIZERS_PARALLELISM": "false", "XLA_FLAGS": flags}


@pytest.fixture(scope="session", autouse=True)
def _no_pauses() -> None:
    """A store of this machine is asked again at once."""
    asking.PAUSES_S = (0.0, 0.0, 0.0)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """A real S3 server on this machine, which is started once."""
    from tests.storage.s3 import Server

    server = Server()
    yield server
    server.end()


@pytest.fixture(scope="module")
def s3(s3_server: Any) -> Iterator[Any]:
    """The tests of a file use the server. They share its bucket: each has a folder of its own there."""
    from tests.storage.s3 import using

    with using(s3_server.environment):
        yield s3_server
