"""`shardwright train` in stages as a user starts it: a rank that is lost in the middle of a pipeline."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.engine_torch.commands import KILLED_WITHIN_S, losses, pid_of_rank, started, wait_for

SMALL = "num_layers=2,embed=64,mlp=128,num_heads=4,num_kv_heads=4"
MODEL = ["llama3-test", "--engine", "torch", "--batch", "8", "--length", "16", "--set", SMALL, "--microbatches", "4"]
STAGES = ["--layout", "pp", "--mesh", "stage=3,fsdp=1", "--stages", "Et|t|L"]


def test_a_rank_lost_in_the_middle_of_a_pipeline_is_named(tmp_path: Path) -> None:
    """The ranks beside it wait for what it was to send."""
    out = tmp_path / "out"
    with started([*MODEL, *STAGES, "--out", str(out), "--steps", "100000"]) as process:
        wait_for(lambda: (out / "metrics.jsonl").exists() and len(losses(out)) >= 2, process)
        os.kill(pid_of_rank(process, 1), signal.SIGKILL)
        began = time.monotonic()
        _, said = process.communicate(timeout=KILLED_WITHIN_S)
    assert process.returncode == 1
    assert time.monotonic() - began < KILLED_WITHIN_S
    assert "shardwright: rank 1 of 3 was ended by SIGKILL." in said
    assert "process 1 of 3" in said
    assert "Traceback" not in said
