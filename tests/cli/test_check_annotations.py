"""`shardwright check` in GitHub Actions: where annotations go, and which lines they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.locks import LAYOUT, LOCK, LOCKING, MOVED, change, typing


@pytest.fixture
def typed(capsys, tmp_path, monkeypatch):
    """A repository whose layout has moved since it was locked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    Path("mine.yaml").write_text(LAYOUT, encoding="utf-8")
    typed = typing(capsys)
    assert typed(*LOCKING)[0] == 0
    Path("mine.yaml").write_text(MOVED, encoding="utf-8")
    return typed


def annotations(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.lstrip().startswith("::")]


def test_only_in_github_actions_or_with_the_option(typed, monkeypatch):
    assert annotations(typed("check")[1]) == []
    (annotated_line,) = annotations(typed("check", "--annotations", "github")[1])
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert annotations(typed("check")[1]) == [annotated_line]
    assert annotations(typed("check", "--annotations", "none")[1]) == []
    monkeypatch.setenv("GITHUB_ACTIONS", "false")
    assert annotations(typed("check")[1]) == []


def test_the_line_of_the_layout_that_caused_it(typed, tmp_path, monkeypatch):
    (line,) = annotations(typed("check", "--annotations", "github")[1])
    assert line.startswith(
        "::error file=mine.yaml,line=5,col=3,title=SW601%3A A locked layout changes only together with"
    )
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path.parent))
    (line,) = annotations(typed("check", "--annotations", "github")[1])
    assert line.startswith(f"::error file={tmp_path.name}/mine.yaml,line=5,")


def test_with_json_they_go_to_stderr(typed, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    code, out, err = typed("check", "--json")
    assert code == 1
    assert json.loads(out)["findings"][0]["code"] == "SW601"
    assert len(annotations(err)) == 1


def test_a_preset_has_no_line_of_the_users_so_it_is_the_locks(typed):
    Path(LOCK).unlink()
    typed("lock", "mixtral-test", "--layout", "ep", "--set", "num_layers=2")
    name = "mixtral-test.ep.lock.json"
    change(Path(name), lambda lock: lock["declaration"]["roles"]["expert"].update(moe="fsdp"))
    change(Path(name), lambda lock: lock["tensors"][3].update(bytes_per_device=1))
    (line,) = annotations(typed("check", "--annotations", "github")[1])
    # The lock is on one line now, which is where the tensor stands.
    assert line.startswith(f"::error file={name},line=1,col=1,")
    assert "the role of 'expert' in moe is 'expert', and was 'fsdp'" in line


def test_the_locks_line_is_that_of_the_first_tensor_that_moved(typed):
    Path("mine.yaml").write_text(LAYOUT, encoding="utf-8")
    lines = Path(LOCK).read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(lines, start=1) if '"name": "layers.moe.gate"' in line)
    lines[number - 1] = lines[number - 1].replace('"bytes_per_device": 131072', '"bytes_per_device": 131073')
    Path(LOCK).write_text("\n".join(lines), encoding="utf-8")
    (line,) = annotations(typed("check", "--annotations", "github")[1])
    assert line.startswith(f"::error file={LOCK},line={number},col=1,")
    assert "layers.moe.gate: 128 KiB" in line


def test_what_cannot_be_checked_is_annotated_too(typed):
    Path("mine.yaml").write_text(LAYOUT.replace("fsdp:   fsdp", "fsdp:   fsbp"), encoding="utf-8")
    first, second = annotations(typed("check", "--annotations", "github")[1])
    assert first.startswith("::error file=mine.yaml,line=4,col=11,title=SW111%3A ")
    assert second.startswith(f"::notice file={LOCK},line=1,col=1,title=SW603%3A ")
    Path("mine.yaml").unlink()
    (line,) = annotations(typed("check", "--annotations", "github")[1])
    assert line == (
        f"::error file={LOCK},line=1,col=1,title=this lock cannot be checked::"
        f"{LOCK}: its request cannot be planned: mine.yaml: no such file."
    )


def test_a_name_with_everything_in_it(typed):
    odd = "a,b:100%\n::error::x.lock.json"
    Path(LOCK).rename(odd)
    code, out, _ = typed("check", odd, "--annotations", "github")
    assert code == 1
    assert "a%2Cb%3A100%25%0A%3A%3Aerror%3A%3Ax.lock.json" not in out
    last = out.splitlines()[-1]
    assert "since a,b:100%25%0A::error::x.lock.json was written" in last
