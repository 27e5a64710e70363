"""A user's own program of two processes saves and loads one checkpoint, and both refuse what one of them cannot save or load."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.checkpoint import open_newest
from tests.conftest import ROOT
from tests.engine_jax.test_processes import free_port

WAIT_S = 240


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, user_environment: dict[str, str]
) -> tuple[Path, list[dict[str, Any]]]:
    """The folder, and what each process found."""
    folder, port = tmp_path_factory.mktemp("own"), free_port()
    flags = f"{user_environment['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    environment = {**user_environment, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine_jax.own_member", f"{port}", f"{index}", f"{folder}"],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    said = [process.communicate(timeout=WAIT_S) for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(err for _, err in said)
    return folder, [json.loads(out.splitlines()[-1]) for out, _ in said]


def test_each_process_loads_its_own_shards(found: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, answers = found
    assert [one["wrong"] for one in answers] == [[], []]
    checkpoint = open_newest(folder / "good")
    np.testing.assert_array_equal(checkpoint.read_box("w"), np.arange(64, dtype=np.float32).reshape(8, 8))
    files = sorted(path.name for path in checkpoint.directory.glob("boxes-*"))
    assert [name[:11] for name in files] == ["boxes-00000", "boxes-00001"]


def test_what_both_need_is_read_by_one_of_them(found: tuple[Path, list[dict[str, Any]]]) -> None:
    """Rows were saved and columns are loaded, and replicas: each process reads about a half of it, and both together all, once."""
    folder, answers = found
    tensors = open_newest(folder / "good").tensors.values()
    total = sum(prod(info.shape) * np.dtype(info.dtype).itemsize for info in tensors)
    read = [one["bytes read"] for one in answers]
    assert sum(read) == total
    assert min(read) > 0


@pytest.mark.parametrize(
    ("case", "messages"),
    [
        (
            "one cannot read",
            [
                "process 1 of 2 could not read its part, which others need too. Its error: FOLDER/good/checkpoints/",
                "cannot be read: Permission denied.",
            ],
        ),
        (
            "host arrays",
            ["  'w', box [0:2]: process 0 and process 1 hold other values"] * 2,
        ),
        (
            "values",
            ["['lr'] is 0.5 on process 0 and 1.0 on process 1: a checkpoint has one value for all. Give all the same"]
            * 2,
        ),
        (
            "one fails",
            [
                "the tree to save: process 1 of 2 could not do it. Its error: 'w' is the function 'len'",
                "'w' is the function 'len': a checkpoint holds arrays",
            ],
        ),
        (
            "load of one",
            [
                "comparing the checkpoint with the tree: process 1 of 2 could not do it.",
                "  'w': shape: found (8, 8), needed (8, 4)",
            ],
        ),
        (
            "no such step",
            [
                "FOLDER/good: there is no checkpoint of step 7. Those there, the newest first: 1.",
                "the checkpoint to load: process 0 of 2 could not do it. Its error: FOLDER/good: there is no checkpoint of step 7.",
            ],
        ),
    ],
)
def test_both_refuse(found: tuple[Path, list[dict[str, Any]]], case: str, messages: list[str]) -> None:
    folder, answers = found
    for answer, message in zip(answers, messages, strict=True):
        assert message in answer[case], answer[case]
    assert not list((folder / "bad").rglob("manifest.json"))
