"""From which checkpoint a run goes on, where one is damaged or --resume-from is given; and that nothing is lost."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from shardwright.checkpoint import DamagedError, OwnedBox, TensorInfo, open_checkpoint, save_checkpoint, verify
from shardwright.checkpoint.format.manifest import PROGRAM
from shardwright.checkpoint.reading import streams
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError
from shardwright.runs import loop, run
from shardwright.runs.own_program.store import program_point
from shardwright.runs.run import _run
from shardwright.training.options import RunOptions, Silent
from tests.checkpoint.states import largest_file
from tests.runs.counting import NOBODY, counting, go, made, options, plan_of, sums
from tests.runs.test_group import each, together
from tests.runs.test_run import contents, losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with a run that saved after each of five steps of six, and its text."""
    folder = tmp_path_factory.mktemp("saved")
    go(counting(), options(folder), checkpoint_every=1, stop_after=5)
    return folder


@pytest.fixture
def run_options(saved: Path, tmp_path: Path) -> RunOptions:
    """Of the same run, in a copy."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return options(tmp_path)


def step(run_options: RunOptions, number: int) -> Path:
    return run_options.out / "checkpoints" / f"step-{number:08d}"


def flip(run_options: RunOptions, number: int, at: int = -1) -> Path:
    """One bit of the checkpoint's elements, by default the last one's."""
    (path,) = step(run_options, number).glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    return path


def goes_on(run_options: RunOptions, **changes) -> list[str]:
    """The messages of a run that goes on to its end. Its result is as if it had never stopped."""
    shown = Silent()
    engine = counting()
    again = replace(run_options, **{"resume": True, "checkpoint_every": 1, **changes})
    outcome = run(again, plan_of(), shown, connection=NOBODY, make_engine=made(engine))
    assert outcome.ended == "finished"
    assert losses(run_options.out) == sums(run_options, 6)
    assert sorted(path.name for path in (run_options.out / "checkpoints").glob("step-????????"))[-1] == "step-00000006"
    assert verify(step(run_options, 6))["ok"]
    return shown.messages


def renamed(run_options: RunOptions, why: str) -> list[str]:
    return sorted(
        re.sub("-[0-9a-f]{8}$", "", path.name) for path in (run_options.out / "checkpoints").glob(f"*.{why}-*")
    )


def test_a_flipped_bit_in_the_newest_checkpoint_is_reported_and_the_one_before_is_taken(
    run_options: RunOptions,
) -> None:
    path = flip(run_options, 5)
    damaged = path.read_bytes()
    messages = goes_on(run_options)
    (aside,) = (run_options.out / "checkpoints").glob("*.damaged-*")
    assert messages[1:] == [
        f"skipped a damaged checkpoint: {path}: tensor 'sums', box [0:4,0:2]: "
        + re.findall(r"bytes \d+ to \d+", messages[1])[0]
        + " do not match their digest: the file was damaged after it was written. Restore it from a copy, or resume from "
        "another checkpoint.",
        f"resumed from {step(run_options, 4)} (layout fsdp)",
        f"kept under another name, damaged: {aside}",
    ]
    assert (aside / path.name).read_bytes() == damaged
    assert aside.name.startswith("step-00000005.damaged-")
    assert verify(run_options.out)["ok"]


def test_damage_to_several_in_several_ways(run_options: RunOptions) -> None:
    flip(run_options, 5)
    (step(run_options, 4) / "manifest.json").write_text("{")
    flip(run_options, 3, at=60)  # in the header
    next(step(run_options, 2).glob("*.safetensors")).unlink()
    messages = goes_on(run_options)
    assert [line.split(": ")[0] for line in messages[1:]] == [
        *["skipped a damaged checkpoint"] * 4,
        f"resumed from {step(run_options, 1)} (layout fsdp)",
        *["kept under another name, damaged"] * 4,
    ]
    assert renamed(run_options, "damaged") == [f"step-0000000{number}.damaged" for number in (2, 3, 4, 5)]


def test_where_all_are_damaged_nothing_is_changed(run_options: RunOptions) -> None:
    for number in range(1, 6):
        flip(run_options, number)
    before = contents(run_options.out)
    with pytest.raises(InputError) as error:
        goes_on(run_options)
    first, *rest = str(error.value).splitlines()
    assert first == (
        f"--resume: there is no intact checkpoint under {run_options.out}, and nothing was changed. Restore one from a copy, or "
        f"begin anew with another --out."
    )
    assert len(rest) == 5
    assert contents(run_options.out) == before


def test_what_cannot_be_read_now_is_not_taken_for_damaged(run_options: RunOptions, monkeypatch) -> None:
    """An error of a disk or of a network file system proves nothing about what was written."""
    before, opened = contents(run_options.out), streams.open_regular

    def unreadable(path):
        if path.parent == step(run_options, 5):
            raise OSError(5, "Input/output error")
        return opened(path)

    monkeypatch.setattr(streams, "open_regular", unreadable)
    with pytest.raises(InputError, match=r"cannot be read: Input/output error\.$"):
        goes_on(run_options)
    assert contents(run_options.out) == before


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({"version": 3}, "found 3, and this release reads version 2. Read it with the release that wrote it."),
        (None, "cannot be read: Is a directory."),
    ],
    ids=["of another release", "unreadable"],
)
def test_a_newest_checkpoint_that_is_not_proven_damaged_is_not_skipped(
    change, messages: str, run_options: RunOptions
) -> None:
    manifest = step(run_options, 5) / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.unlink()
    if change is None:
        manifest.mkdir()
    else:
        manifest.write_text(json.dumps({**content, **change}))
    before = contents(run_options.out)
    with pytest.raises(InputError) as error:
        goes_on(run_options)
    assert str(error.value).startswith(f"--resume: {manifest}: ")
    assert str(error.value).endswith(
        f"{messages} Nothing proves that it is damaged, so it was not skipped. See why, or give the step to go on from with "
        f"--resume-from."
    )
    assert contents(run_options.out) == before
    assert renamed(run_options, "damaged") == []
    goes_on(run_options, resume_from=4)
    assert renamed(run_options, "set-aside") == ["step-00000005.set-aside"]


def test_resume_from_takes_its_step_and_keeps_later_ones_under_another_name(run_options: RunOptions) -> None:
    later = {number: contents(step(run_options, number)) for number in (4, 5)}
    lines = (run_options.out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    messages = goes_on(run_options, resume=False, resume_from=3)
    assert messages[1] == f"resumed from {step(run_options, 3)} (layout fsdp)"
    assert renamed(run_options, "set-aside") == ["step-00000004.set-aside", "step-00000005.set-aside"]
    for number, before in later.items():
        (aside,) = (run_options.out / "checkpoints").glob(f"step-0000000{number}.set-aside-*")
        assert f"kept under another name, later than step 3: {aside}" in messages
        assert sorted(contents(aside).values()) == sorted(before.values())
        assert verify(aside)["ok"]
    (rest,) = run_options.out.glob("metrics.jsonl.set-aside-*")
    assert rest.read_bytes() == b"".join(lines[3:])
    assert f"{run_options.out}/metrics.jsonl: the lines of the steps after 3 are kept in {rest}" in messages


def test_resume_from_on_a_full_disk_changes_nothing(run_options: RunOptions) -> None:
    before = contents(run_options.out)
    with largest_file(4), pytest.raises(InputError, match=r"metrics[.]jsonl cannot be written: File too large[.]"):
        goes_on(run_options, resume_from=3)
    assert contents(run_options.out) == before


def test_resume_from_that_is_killed_before_its_first_step_loses_no_line(
    run_options: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the next run has --resume alone."""
    lines = (run_options.out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    with monkeypatch.context() as ended:
        ended.setattr(loop, "journal", None)
        with pytest.raises(TypeError):
            goes_on(run_options, resume_from=3)
    assert (run_options.out / "metrics.jsonl").read_bytes() == b"".join(lines)
    goes_on(run_options)
    (rest,) = run_options.out.glob("metrics.jsonl.set-aside-*")
    assert rest.read_bytes() == b"".join(lines[3:])


def test_a_checkpoint_of_a_program_of_ones_own_is_no_run(run_options: RunOptions) -> None:
    newest = save_checkpoint(
        run_options.out,
        program_point(9, "dict", {PROGRAM: "jax", "values": {}}),
        [TensorInfo(name="w", shape=(), dtype="float32")],
        [OwnedBox(name="w", box=Box((), ()), array=np.float32(1.0))],
    )
    with pytest.raises(InputError) as error:
        goes_on(run_options)
    assert str(error.value) == (
        f"{newest}: a program of your own saved it, and no run of shardwright train, so there is none to go on with. Give another "
        f"--out."
    )


def test_resume_from_a_missing_step(run_options: RunOptions) -> None:
    shutil.rmtree(step(run_options, 4))
    before = contents(run_options.out)
    with pytest.raises(InputError) as error:
        goes_on(run_options, resume_from=4)
    assert str(error.value) == (
        f"--resume-from 4: there is no checkpoint of that step under {run_options.out}. Those there: 1, 2, 3, 5."
    )
    assert contents(run_options.out) == before


@pytest.mark.parametrize("at", [-1, 60])
def test_resume_from_a_damaged_step_takes_no_other(at: int, run_options: RunOptions) -> None:
    path = flip(run_options, 3, at=at)
    before = contents(run_options.out)
    with pytest.raises(InputError) as error:
        goes_on(run_options, resume_from=3)
    assert str(error.value).startswith(f"--resume-from 3: {path}: ")
    assert str(error.value).endswith(
        "Nothing was changed. Give --resume instead, which takes the newest intact one, or another step."
    )
    assert contents(run_options.out) == before


@pytest.mark.parametrize("reader", [0, 1])
def test_a_checkpoint_that_one_of_two_processes_finds_damaged_both_skip(reader: int, run_options: RunOptions) -> None:
    flip(run_options, 5)
    flip(run_options, 4)
    engines = [counting(offsets=(0, 1)), counting(offsets=(2, 3))]
    begin = engines[1 - reader].begin
    # The other one has no need of the box that is damaged.
    taken: list[int] = []

    def begun(checkpoint, seed):
        assert checkpoint is not None
        taken.append(checkpoint.point.step)
        return begin(open_checkpoint(step(run_options, 3)) if checkpoint.point.step > 3 else checkpoint, seed)

    engines[1 - reader].begin = begun
    shown = [Silent(), Silent()]
    again = replace(run_options, resume=True, stop_after=4)
    with together(2) as groups:
        ended = each(
            groups, lambda group: _run(again, plan_of(), shown[group.index], group, made(engines[group.index]))
        )
    assert [outcome.step for outcome in ended] == [4, 4]
    assert taken == [5, 4, 3]
    assert renamed(run_options, "damaged") == ["step-00000004.damaged", "step-00000005.damaged"]
    resumed = f"resumed from {step(run_options, 3)} (layout fsdp)"
    said = [[line.split(":")[0] for line in one.messages if line.startswith(("skipped", "resumed"))] for one in shown]
    # Process 0 chooses for all of them.
    assert said == [[*["skipped a damaged checkpoint"] * 2, resumed], [resumed]]


@pytest.mark.parametrize("seed", range(12))
def test_a_bit_anywhere_in_the_newest_step_costs_that_step_and_no_more(seed: int, run_options: RunOptions) -> None:
    """In its elements, its header or its manifest: what is proven damaged is passed over; what might be another release's
    is refused, and --resume-from goes on from the step before.
    """
    random = Random(seed)
    path = random.choice(sorted(path for path in step(run_options, 5).iterdir() if path.is_file()))
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)
    with pytest.raises(InputError) as damage:
        open_checkpoint(step(run_options, 5)).read_box("sums")
    if isinstance(damage.value, DamagedError):
        goes_on(run_options)
        assert renamed(run_options, "damaged") == ["step-00000005.damaged"]
    else:
        goes_on(run_options, resume_from=4)
        assert renamed(run_options, "set-aside") == ["step-00000005.set-aside"]


def test_a_full_disk_ends_a_run_that_can_be_resumed_later(run_options: RunOptions) -> None:
    shutil.rmtree(run_options.out)
    go(counting(), run_options, checkpoint_every=1, stop_after=2)
    before = contents(run_options.out / "checkpoints")
    with largest_file(2000), pytest.raises(InputError) as error:
        go(counting(), run_options, checkpoint_every=1, resume=True)
    assert str(error.value) == (
        f"{step(run_options, 3)}: this checkpoint could not be written: File too large. Free some space, then go on with --resume. "
        f"Nothing of it was kept, and earlier checkpoints are as they were."
    )
    assert contents(run_options.out / "checkpoints") == before
    size = (run_options.out / "metrics.jsonl").stat().st_size
    # The step is done; of its line only a part fits on the disk.
    with largest_file(size - 10), pytest.raises(InputError) as error:
        go(counting(), run_options, checkpoint_every=None, resume=True)
    assert str(error.value) == (
        f"{run_options.out}/metrics.jsonl cannot be written: No space left on device. Free some space, then go on with --resume, "
        f"from the newest checkpoint. No checkpoint is lost, and no line before this one."
    )
    assert contents(run_options.out / "checkpoints") == before
    messages = goes_on(run_options)
    assert (
        f"{run_options.out}/metrics.jsonl: the last line is incomplete, as a killed run leaves it; its step is done again"
        in messages
    )
