"""SIGKILL before every call of a save: the last committed checkpoint loads, and nothing half-written is taken for one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from shardwright.checkpoint import latest, verify
from shardwright.checkpoint.folder.directory import committed, leftovers
from tests.checkpoint.states import save, small_state

# Saves tensors filled with their step's number, and keeps two checkpoints.
SAVES = """
import os, signal, sys
from pathlib import Path
import numpy as np
from shardwright.checkpoint import OwnedBox, RunPoint, TensorInfo, save_checkpoint
from shardwright.core.boxes.box import Box

def save_step(out, step, columns):
    infos = [TensorInfo(name=f"w{number}", shape=(64, columns), dtype="float32") for number in range(3)]
    boxes = [Box((row, 0), (row + 16, columns)) for row in range(0, 64, 16)]
    array = np.full((16, columns), step, np.float32)
    owned = [OwnedBox(name=info.name, box=box, array=array) for info in infos for box in boxes]
    point = RunPoint(step=step, seed=0, data_position=step, model="m", layout_name="l", layout_text="", mesh={})
    save_checkpoint(out, point, infos, owned, keep=2)
"""

# For each call of a save that changes or opens a file, a process killed just before that call, in a directory of its
# own where steps 1 and 2 were saved. The last one is not killed.
AT_EVERY_CALL = f"""
{SAVES}
CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree")

def kill_before(number):
    left = [number]
    def count(event, args):
        if event in CALLS:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
    sys.addaudithook(count)

for number in range(1000):
    out = Path(sys.argv[1]) / f"{{number:03d}}"
    save_step(out, 1, 8)
    save_step(out, 2, 8)
    child = os.fork()
    if child == 0:
        kill_before(number)
        save_step(out, 3, 8)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
"""


def whole(out: Path) -> int:
    """The step of the newest checkpoint. Every byte of every checkpoint is verified to be that of its step."""
    assert verify(out)["ok"]
    found = latest(out)
    assert found.passed_over == ()
    assert found.checkpoint is not None
    step = found.checkpoint.point.step
    for name in found.checkpoint.tensors:
        assert np.all(found.checkpoint.read_box(name) == step)
    return step


def test_killed_at_every_call_of_a_save(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", AT_EVERY_CALL, str(tmp_path)], check=True)
    runs = sorted(tmp_path.iterdir())
    found = [whole(out) for out in runs]
    before, after = found.count(2), found.count(3)
    assert found == [2] * before + [3] * after
    assert before > 8
    assert after > 8
    assert leftovers(runs[-1]) == ()
    assert any(leftovers(out) for out in runs[:before])
    assert any(leftovers(out) for out in runs[before:])
    for out in runs:
        save(out, small_state(), step=4, keep=2)
        assert leftovers(out) == ()
        assert len(committed(out)) == 2
