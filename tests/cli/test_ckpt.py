"""`shardwright ckpt show` and `ckpt verify`: output and exit codes."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from shardwright.checkpoint import Retention, describe, verify
from shardwright.checkpoint.writing import save as save_module
from shardwright.cli.main import main
from tests.checkpoint.states import save, small_state


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture(autouse=True)
def at_one_time(monkeypatch):
    monkeypatch.setattr(save_module, "now", lambda: datetime(2026, 3, 1, 8, 15, 42, tzinfo=UTC))


def test_show(tmp_path, capsys):
    rules = Retention(newest=1, every_steps=5, best=1)
    for step, loss in ((4, 1.25), (5, 3.5), (10, 2.75)):
        newest = save(tmp_path, small_state(), step=step, keep=rules, metrics={"loss": loss, "grad_norm": 0.5})
    assert main(["ckpt", "show", str(tmp_path)]) == 0
    assert capsys.readouterr() == (
        f"""{newest}
  step      10
  model     llama3-test
  layout    fsdp on data 1 x fsdp 8
  seed      3
  next row  80
  size      464 bytes (464 B) in 1 file
  saved     2026-03-01 08:15:42 UTC
  metrics   loss 2.75, grad_norm 0.5

tensors
    tensor  shape  dtype     at rest        boxes  bytes
  embed
    embed   4x8    float32   spec of embed      2  128 B
  scale
    scale   6      bfloat16  spec of scale      1   12 B
  count
    count   1      int32     spec of count      1    4 B

checkpoints
  step  saved                    loss  bytes  kept by                directory
    10  2026-03-01 08:15:42 UTC  2.75  464 B  newest, every 5 steps  step-00000010
     5  2026-03-01 08:15:42 UTC   3.5  464 B  every 5 steps          step-00000005
     4  2026-03-01 08:15:42 UTC  1.25  464 B  lowest loss            step-00000004

""",
        "",
    )


def test_show_names_what_changed_in_the_run(tmp_path, capsys):
    changes = [
        {"step": 4, "name": "lr", "was": 3e-4, "is": 1e-4},
        {"step": 8, "name": "data", "was": "0123456789abcdef", "is": "fedcba9876543210"},
        {"what": "not a change"},
    ]
    save(tmp_path, small_state(), metadata={"changes": changes})
    assert main(["ckpt", "show", str(tmp_path)]) == 0
    assert (
        "  changes   after step 4: lr from 0.0003 to 0.0001\n            after step 8: data from 01234567 to fedcba98\n"
    ) in capsys.readouterr().out


def test_show_and_verify_with_json_are_the_results_of_the_store(tmp_path, capsys):
    save(tmp_path, small_state())
    for verb, value in (("show", describe(tmp_path)), ("verify", verify(tmp_path))):
        assert main(["ckpt", verb, str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(value))


def test_an_intact_checkpoint(tmp_path, capsys):
    directory = save(tmp_path, small_state())
    assert main(["ckpt", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr() == (f"intact   {directory}  4 boxes, 464 B\n", "")


def test_one_changed_byte_is_found(tmp_path, capsys):
    directory = save(tmp_path, small_state())
    (path,) = directory.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["ckpt", "verify", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    first, second, *_ = out.splitlines()
    assert first == f"damaged  {directory}  4 boxes, 464 B"
    assert second.startswith(f"  SW503: {path}")
    assert err == ""
    assert main(["ckpt", "verify", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_checkpoint_that_cannot_be_read_is_shown_as_damaged(tmp_path, capsys):
    save(tmp_path, small_state(), step=5)
    newest = save(tmp_path, small_state(), step=10)
    (newest / "manifest.json").write_text("[]", encoding="utf-8")
    assert main(["ckpt", "show", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "  step      5\n" in out
    assert f"damaged  {newest}" in out


@pytest.mark.parametrize("verb", ["show", "verify"])
def test_no_checkpoint_there(verb, tmp_path, capsys):
    assert main(["ckpt", verb, str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"shardwright: {tmp_path}: there is no checkpoint here. ")
