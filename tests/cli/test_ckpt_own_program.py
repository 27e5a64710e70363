"""Commands for models of ours, given a checkpoint that a user's own program saved: they say so, and change nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardwright.cli.main import main
from shardwright.engine_jax import save

COMMANDS = {
    "show": "ckpt show OWN --for fsdp --mesh fsdp=2",
    "reshard": "ckpt reshard OWN --layout fsdp --mesh fsdp=2 --out NEW",
    "export": "ckpt export huggingface OWN --out NEW",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_layout_says_nothing_of_a_program_of_ones_own(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = save(tmp_path / "own", {"w": np.zeros((4, 4), np.float32)}, step=1)
    given = command.replace("OWN", str(tmp_path / "own")).replace("NEW", str(tmp_path / "new")).split()
    assert main(given) == 2
    assert capsys.readouterr().err == (
        f"shardwright: {where}: a program of your own saved it, and its tensors are those of no model here. load of "
        f"shardwright.engine_jax and engine_torch reads it onto any sharding; ckpt export dcp and export orbax write it for other "
        f"programs.\n"
    )
    assert not (tmp_path / "new").exists()
