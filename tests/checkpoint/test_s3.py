"""Checkpoints in S3: a real server, asked over HTTP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardwright.checkpoint import (
    CheckpointError,
    DamagedError,
    commit,
    describe,
    open_checkpoint,
    save_checkpoint,
    saving,
    verify,
    write_part,
)
from shardwright.cli.main import main
from shardwright.storage import objects
from shardwright.storage.client import NO_BUCKET, NO_CREDENTIALS, NOT_ALLOWED, UNREACHABLE
from shardwright.storage.url import Url
from tests.checkpoint.states import State, point, random_state, same_bits, small_state
from tests.storage.s3 import Server, answering, keys, put, serving, using

STATE = small_state()
ROOT = Path(__file__).parents[2]


@pytest.fixture
def out(s3: Server, request: pytest.FixtureRequest) -> str:
    """The URL of a run of its own."""
    del s3
    return f"s3://bucket/{request.node.name}"


def save(out: str, step: int = 10, state: State = STATE, keep: int | None = None, run: str | None = None) -> str:
    return str(save_checkpoint(out, point(step), state.infos, state.owned, keep=keep, run=run))


def whole(directory: str | Path, state: State = STATE) -> bool:
    checkpoint = open_checkpoint(directory)
    return verify(directory)["ok"] and all(
        same_bits(checkpoint.read_box(name), array) for name, array in state.arrays.items()
    )


def copied(out: str, folder: Path) -> Path:
    """A run as ``aws s3 cp --recursive`` copies it."""
    prefix = out.removeprefix("s3://bucket/")
    for name, data in keys(f"{prefix}/").items():
        target = folder / name.removeprefix(f"{prefix}/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return folder


def test_a_save_is_what_another_client_downloads(out: str, tmp_path: Path) -> None:
    state = random_state(3)
    step = save(out, 10, state)
    assert whole(step, state)
    assert whole(copied(out, tmp_path) / "checkpoints" / "step-00000010", state)


def test_boxes_larger_than_a_request_and_a_part(out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A box of 22 MiB, uploaded in parts of 5 MiB, S3's smallest, and read in ranges of 3 MiB."""
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(objects, "REQUEST_BYTES", 3 << 20)
    array = np.random.default_rng(0).integers(0, 255, (22, 1 << 20), np.uint8)
    state = State(arrays={"large": array}, boxes={"large": [STATE.boxes["count"][0].whole(array.shape)]})
    step = save(out, 10, state)
    np.testing.assert_array_equal(open_checkpoint(step).read_box("large"), array)


def test_the_server_refuses_the_second_manifest_of_a_step(out: str) -> None:
    other = State(arrays={**STATE.arrays, "count": np.array(8, np.int32)}, boxes=STATE.boxes)
    with saving(out, 10) as second:
        write_part(second, other.infos, other.owned)
        save(out, 10)
        with pytest.raises(CheckpointError, match="this step was saved before"):
            commit(second, point())
    assert whole(f"{out}/checkpoints/step-00000010")
    assert describe(out)["leftovers"] == []


def test_one_of_two_manifests_at_the_same_time_is_refused(out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both writers have found none: only the condition of the request tells them apart."""
    from s3fs import S3FileSystem

    monkeypatch.setattr(S3FileSystem, "exists", lambda *_: False)
    url = Url(out) / "manifest.json"
    objects.put_new(url, b"first")
    with pytest.raises(FileExistsError):
        objects.put_new(url, b"other")
    assert objects.read(url, 100) == b"first"


KILLED = """
import os, signal, sys
from shardwright.checkpoint import saving, write_part
from tests.checkpoint.states import small_state
with saving(sys.argv[1], 20, run="5f0c9a17") as save:
    write_part(save, small_state().infos, small_state().owned)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.matrix
def test_a_killed_save_is_no_checkpoint_and_the_next_of_its_run_deletes_it(out: str) -> None:
    save(out, 10)
    ended = subprocess.run([sys.executable, "-c", KILLED, out], cwd=ROOT, check=False)
    assert ended.returncode == -9
    found = describe(out)
    assert [one["step"] for one in found["checkpoints"]] == [10]
    assert len(found["under_way"]) == 1
    assert found["under_way"][0].startswith("step-00000020/5f0c9a17-")
    save(out, 30)
    assert describe(out)["under_way"] == found["under_way"]
    save(out, 40, run="5f0c9a17", keep=2)
    after = describe(out)
    assert ([one["step"] for one in after["checkpoints"]], after["under_way"]) == ([40, 30], [])
    assert {name.split("/")[2] for name in keys(f"{out.removeprefix('s3://bucket/')}/")} == {
        "step-00000030",
        "step-00000040",
    }


def test_verify_finds_a_flipped_bit(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = save(out, 10)
    assert main(["ckpt", "verify", out]) == 0
    ((name, data),) = [(name, data) for name, data in keys(out[12:]).items() if name.endswith(".safetensors")]
    put(name, data[:-5] + bytes([data[-5] ^ 16]) + data[-4:])
    assert main(["ckpt", "verify", out]) == 1
    printed = capsys.readouterr().out
    assert "damaged" in printed
    checked = verify(step)
    assert [problem["message"] for problem in checked["checkpoints"][0]["problems"]] == [
        f"s3://bucket/{name}: tensor 'scale', box [0:6]: bytes {len(data) - 12} to {len(data)} do not match their digest: the file "
        f"was damaged after it was written. Restore it from a copy, or resume from another checkpoint."
    ]
    put(name, data[:-5])
    with pytest.raises(DamagedError, match=f"found {len(data) - 5} bytes, needed {len(data)}"):
        open_checkpoint(step)


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "a-secret" not in printed.err + printed.out
    return printed.err.removeprefix("shardwright: ").rstrip("\n")


DENIED = b"<Error><Code>InvalidAccessKeyId</Code><Message>The key a-key does not exist.</Message></Error>"


def test_what_the_store_refuses_is_one_message(s3: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        refusal(["ckpt", "show", "s3://no-bucket/run"], capsys) == f"s3://no-bucket/run: cannot be read: {NO_BUCKET}."
    )
    assert refusal(["ckpt", "show", "s3://bucket/nothing"], capsys) == (
        "s3://bucket/nothing: there is no checkpoint here. Give the --out of a run, or the directory of one step, as in "
        "OUT/checkpoints/step-00000010."
    )
    for status, body, why in ((403, DENIED, NOT_ALLOWED), (500, b"", None)):
        with answering(status, body):
            message = refusal(["ckpt", "verify", "s3://bucket/run"], capsys)
            assert message.startswith("s3://bucket/run: cannot be read: ")
            assert why is None or message.endswith(f": {why}.")
    without = {name: value for name, value in s3.environment.items() if "ACCESS_KEY" not in name}
    empty = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "")
    with using({**without, **empty, "AWS_CONFIG_FILE": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}):
        message = refusal(["ckpt", "verify", "s3://bucket/run"], capsys)
        assert message == f"s3://bucket/run: cannot be read: {NO_CREDENTIALS}."


def test_a_server_that_goes_away_in_the_middle(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as mortal:
        step = save("s3://bucket/run", 10)
        checkpoint = open_checkpoint(step)
        with saving("s3://bucket/run", 20) as begun:
            mortal.end()
            with pytest.raises(CheckpointError) as raised:
                write_part(begun, STATE.infos, STATE.owned)
        assert str(raised.value) == (
            f"s3://bucket/run/checkpoints/step-00000020: this checkpoint could not be written: {UNREACHABLE}. Without a manifest it "
            f"is none, and earlier checkpoints are as they were."
        )
        with pytest.raises(CheckpointError) as raised:
            checkpoint.read_box("embed")
        assert type(raised.value) is CheckpointError
        assert str(raised.value).endswith(f"cannot be read: {UNREACHABLE}.")
        assert refusal(["ckpt", "verify", "s3://bucket/run"], capsys).endswith(f": cannot be read: {UNREACHABLE}.")


def test_a_connection_that_is_dropped_in_the_middle_of_an_answer() -> None:
    with answering(200, b"{", length=1000), pytest.raises(CheckpointError) as raised:
        open_checkpoint("s3://bucket/run/checkpoints/step-00000010")
    assert not isinstance(raised.value, DamagedError)
