"""From which checkpoint a run goes on, where one of them is damaged or a person says which; and that nothing is lost by it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

import shardwright.checkpoint.verified as verified
from shardwright.checkpoint import DamagedError, open_checkpoint, verify
from shardwright.core.findings.errors import InputError
from shardwright.runs import loop, run
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
def told(saved: Path, tmp_path: Path) -> RunOptions:
    """Of the same run, in a copy."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return options(tmp_path)


def step(told: RunOptions, number: int) -> Path:
    return told.out / "checkpoints" / f"step-{number:08d}"


def flip(told: RunOptions, number: int, at: int = -1) -> Path:
    """One bit of the checkpoint's elements, by default the last one's."""
    (path,) = step(told, number).glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    return path


def goes_on(told: RunOptions, **changes) -> list[str]:
    """What is said by a run that goes on to its end, which is as if it had never stopped."""
    shown = Silent()
    engine = counting()
    again = replace(told, **{"resume": True, "checkpoint_every": 1, **changes})
    outcome = run(again, plan_of(), shown, connection=NOBODY, make_engine=made(engine))
    assert outcome.ended == "finished"
    assert losses(told.out) == sums(told, 6)
    assert sorted(path.name for path in (told.out / "checkpoints").glob("step-????????"))[-1] == "step-00000006"
    assert verify(step(told, 6))["ok"]
    return shown.messages


def beside(told: RunOptions, why: str) -> list[str]:
    return sorted(re.sub("-[0-9a-f]{8}$", "", path.name) for path in (told.out / "checkpoints").glob(f"*.{why}-*"))


def test_a_flipped_bit_in_the_newest_step_is_told_and_set_aside_and_the_one_before_is_taken(
    told: RunOptions,
) -> None:
    path = flip(told, 5)
    damaged = path.read_bytes()
    said = goes_on(told)
    (aside,) = (told.out / "checkpoints").glob("*.damaged-*")
    assert said[1:] == [
        f"skipped a damaged checkpoint: {path}: tensor 'sums', box [3:4,0:2]: "
        + re.findall(r"bytes \d+ to \d+", said[1])[0]
        + " do not match their digest: the file was damaged after it was written. Restore it from a copy, or resume from "
        "another checkpoint.",
        f"resumed from {step(told, 4)} (layout fsdp)",
        f"kept under another name, damaged: {aside}",
    ]
    assert (aside / path.name).read_bytes() == damaged
    assert aside.name.startswith("step-00000005.damaged-")
    assert verify(told.out)["ok"]


def test_damage_to_several_in_several_ways(told: RunOptions) -> None:
    flip(told, 5)
    (step(told, 4) / "manifest.json").write_text("{")
    flip(told, 3, at=60)  # in the header
    next(step(told, 2).glob("*.safetensors")).unlink()
    said = goes_on(told)
    assert [line.split(": ")[0] for line in said[1:]] == [
        *["skipped a damaged checkpoint"] * 4,
        f"resumed from {step(told, 1)} (layout fsdp)",
        *["kept under another name, damaged"] * 4,
    ]
    assert beside(told, "damaged") == [f"step-0000000{number}.damaged" for number in (2, 3, 4, 5)]


def test_where_all_are_damaged_nothing_is_changed(told: RunOptions) -> None:
    for number in range(1, 6):
        flip(told, number)
    before = contents(told.out)
    with pytest.raises(InputError) as error:
        goes_on(told)
    first, *rest = str(error.value).splitlines()
    assert first == (
        f"--resume: there is no intact checkpoint under {told.out}, and nothing was changed. Restore one from a copy, or "
        f"begin anew with another --out."
    )
    assert len(rest) == 5
    assert contents(told.out) == before


def test_what_cannot_be_read_now_is_not_taken_for_damaged(told: RunOptions, monkeypatch) -> None:
    """An error of a disk or of a network file system proves nothing about what was written."""
    before, whole = contents(told.out), verified._read_verified

    def unreadable(directory, tensor, stored):
        if directory == step(told, 5):
            raise verified.read_error(directory, tensor, stored, OSError(5, "Input/output error"))
        return whole(directory, tensor, stored)

    monkeypatch.setattr(verified, "_read_verified", unreadable)
    with pytest.raises(InputError, match=r"cannot be read: Input/output error\.$"):
        goes_on(told)
    assert contents(told.out) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "found 2, and this release reads version 1. Read it with the release that wrote it."),
        (None, "cannot be read: Is a directory."),
    ],
    ids=["of another release", "unreadable"],
)
def test_a_newest_one_that_is_not_proven_damaged_is_not_passed_over(change, said: str, told: RunOptions) -> None:
    manifest = step(told, 5) / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.unlink()
    if change is None:
        manifest.mkdir()
    else:
        manifest.write_text(json.dumps({**content, **change}))
    before = contents(told.out)
    with pytest.raises(InputError) as error:
        goes_on(told)
    assert str(error.value).startswith(f"--resume: {manifest}: ")
    assert str(error.value).endswith(
        f"{said} Nothing proves that it is damaged, so it was not skipped. See why, or give the step to go on from with "
        f"--resume-from."
    )
    assert contents(told.out) == before
    assert beside(told, "damaged") == []
    goes_on(told, resume_from=4)
    assert beside(told, "set-aside") == ["step-00000005.set-aside"]


def test_a_step_that_is_asked_for_is_taken_and_what_is_later_is_kept_beside(told: RunOptions) -> None:
    later = {number: contents(step(told, number)) for number in (4, 5)}
    lines = (told.out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    said = goes_on(told, resume=False, resume_from=3)
    assert said[1] == f"resumed from {step(told, 3)} (layout fsdp)"
    assert beside(told, "set-aside") == ["step-00000004.set-aside", "step-00000005.set-aside"]
    for number, before in later.items():
        (aside,) = (told.out / "checkpoints").glob(f"step-0000000{number}.set-aside-*")
        assert f"kept under another name, later than step 3: {aside}" in said
        assert sorted(contents(aside).values()) == sorted(before.values())
        assert verify(aside)["ok"]
    (rest,) = told.out.glob("metrics.jsonl.set-aside-*")
    assert rest.read_bytes() == b"".join(lines[3:])
    assert f"{told.out}/metrics.jsonl: the lines of the steps after 3 are kept in {rest}" in said


def test_going_back_without_room_for_the_lines_changes_nothing(told: RunOptions) -> None:
    before = contents(told.out)
    with largest_file(4), pytest.raises(InputError, match=r"metrics[.]jsonl cannot be written: File too large[.]"):
        goes_on(told, resume_from=3)
    assert contents(told.out) == before


def test_going_back_that_is_ended_before_its_first_step_loses_no_line(
    told: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes on from there: also without being told to go back."""
    lines = (told.out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    with monkeypatch.context() as ended:
        ended.setattr(loop, "journal", None)
        with pytest.raises(TypeError):
            goes_on(told, resume_from=3)
    assert (told.out / "metrics.jsonl").read_bytes() == b"".join(lines)
    goes_on(told)
    (rest,) = told.out.glob("metrics.jsonl.set-aside-*")
    assert rest.read_bytes() == b"".join(lines[3:])


def test_a_step_that_is_asked_for_and_is_not_there(told: RunOptions) -> None:
    shutil.rmtree(step(told, 4))
    before = contents(told.out)
    with pytest.raises(InputError) as error:
        goes_on(told, resume_from=4)
    assert str(error.value) == (
        f"--resume-from 4: there is no checkpoint of that step under {told.out}. Those there: 1, 2, 3, 5."
    )
    assert contents(told.out) == before


@pytest.mark.parametrize("at", [-1, 60])
def test_a_step_that_is_asked_for_and_is_damaged_is_not_replaced_by_another(at: int, told: RunOptions) -> None:
    path = flip(told, 3, at=at)
    before = contents(told.out)
    with pytest.raises(InputError) as error:
        goes_on(told, resume_from=3)
    assert str(error.value).startswith(f"--resume-from 3: {path}: ")
    assert str(error.value).endswith(
        "Nothing was changed. Give --resume instead, which takes the newest intact one, or another step."
    )
    assert contents(told.out) == before


@pytest.mark.parametrize("reader", [0, 1])
def test_what_one_of_two_processes_finds_damaged_both_pass_over(reader: int, told: RunOptions) -> None:
    flip(told, 5)
    flip(told, 4)
    engines = [counting(offsets=(0, 1)), counting(offsets=(2, 3))]
    begin = engines[1 - reader].begin
    # The other one has no need of the box that is damaged.
    taken: list[int] = []

    def begun(checkpoint, seed):
        assert checkpoint is not None
        taken.append(checkpoint.point.step)
        return begin(open_checkpoint(step(told, 3)) if checkpoint.point.step > 3 else checkpoint, seed)

    engines[1 - reader].begin = begun
    shown = [Silent(), Silent()]
    again = replace(told, resume=True, stop_after=4)
    with together(2) as groups:
        ended = each(
            groups, lambda group: _run(again, plan_of(), shown[group.index], group, made(engines[group.index]))
        )
    assert [outcome.step for outcome in ended] == [4, 4]
    assert taken == [5, 4, 3]
    assert beside(told, "damaged") == ["step-00000004.damaged", "step-00000005.damaged"]
    for one in shown:
        assert [line.split(":")[0] for line in one.messages if line.startswith(("skipped", "resumed"))] == [
            *["skipped a damaged checkpoint"] * 2,
            f"resumed from {step(told, 3)} (layout fsdp)",
        ]


@pytest.mark.parametrize("seed", range(12))
def test_a_bit_anywhere_in_the_newest_step_costs_that_step_and_no_more(seed: int, told: RunOptions) -> None:
    """In its elements, its header or its manifest: what is proven damaged is passed over; what might be another release's
    is refused, and goes on from the step before when told to.
    """
    random = Random(seed)
    path = random.choice(sorted(path for path in step(told, 5).iterdir() if path.is_file()))
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)
    with pytest.raises(InputError) as damage:
        open_checkpoint(step(told, 5)).read_box("sums")
    if isinstance(damage.value, DamagedError):
        goes_on(told)
        assert beside(told, "damaged") == ["step-00000005.damaged"]
    else:
        goes_on(told, resume_from=4)
        assert beside(told, "set-aside") == ["step-00000005.set-aside"]


def test_a_disk_without_room_ends_a_run_that_goes_on_when_there_is_some(told: RunOptions) -> None:
    shutil.rmtree(told.out)
    go(counting(), told, checkpoint_every=1, stop_after=2)
    before = contents(told.out / "checkpoints")
    with largest_file(1000), pytest.raises(InputError) as error:
        go(counting(), told, checkpoint_every=1, resume=True)
    assert str(error.value) == (
        f"{step(told, 3)}: this checkpoint could not be written: File too large. Free some space, then go on with --resume. "
        f"Nothing of it was kept, and earlier checkpoints are as they were."
    )
    assert contents(told.out / "checkpoints") == before
    size = (told.out / "metrics.jsonl").stat().st_size
    # The step is done; of its line there is room for a part alone.
    with largest_file(size - 10), pytest.raises(InputError) as error:
        go(counting(), told, checkpoint_every=None, resume=True)
    assert str(error.value) == (
        f"{told.out}/metrics.jsonl cannot be written: No space left on device. Free some space, then go on with --resume, "
        f"from the newest checkpoint. No checkpoint is lost, and no line before this one."
    )
    assert contents(told.out / "checkpoints") == before
    said = goes_on(told)
    assert (
        f"{told.out}/metrics.jsonl: the last line is incomplete, as a killed run leaves it; its step is done again"
        in said
    )
