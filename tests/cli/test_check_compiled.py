"""A lock with a compiled program: compared where it can be compiled again, and reported as skipped where it cannot."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import jax
import pytest

from shardwright.cli.main import main
from shardwright.cli.reviewing import locked_program
from shardwright.cli.reviewing.checked import check
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.findings.finding import Finding
from shardwright.cost import read_machine
from shardwright.locks.lock import compiled_program
from tests.cli.locks import LAYOUT, LOCK, LOCKING, MOVED, change
from tests.core.test_lock import PROGRAM, VERSIONS

PART = compiled_program("cpu:8", PROGRAM, VERSIONS)


@pytest.fixture(autouse=True)
def _locked(capsys, tmp_path, monkeypatch):
    """A folder with a layout and a lock of it that was compiled for cpu:8."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    Path("mine.yaml").write_text(LAYOUT, encoding="utf-8")
    assert main([*LOCKING, "--json"]) == 0
    change(Path(LOCK), lambda lock: lock.update(compiled=PART, request={**lock["request"], "chips": "cpu:8"}))
    capsys.readouterr()


def missing(*_):
    raise InputError("compiling needs the package 'libtpu', which is not installed. Install it with: ...")


def too_large(*_):
    raise FindingsError([Finding(code="SW312", severity="error", where="x", found="y", needed="z")])


def test_the_same_program_is_no_news():
    checked = check(Path(LOCK), compiler=lambda *_: PART)
    assert (checked.exit_code, checked.findings) == (0, ())
    assert checked.found.compiled is not None


def test_a_program_that_moved_under_a_plan_that_did_not():
    program = deepcopy(PROGRAM)
    program["collectives"][0] |= {"kind": "all-gather", "axes": ["fsdp"], "bytes_per_device": 2**20}
    part = compiled_program("cpu:8", program, {**VERSIONS, "jax": "0.11.0"})
    checked = check(Path(LOCK), compiler=lambda *_: part)
    (finding,) = checked.findings
    assert checked.exit_code == 1
    assert finding.found.startswith(f"the compiled program moved, since {LOCK} was written\n")
    assert finding.cost == "of a device: 388 B -> 2.00 MiB in the compiled program's collectives, x5.41e+03"
    assert check(Path(LOCK), compiler=lambda *_: part, update=True).written
    held = json.loads(Path(LOCK).read_text(encoding="utf-8"))
    assert held["compiled"] == part
    assert check(Path(LOCK), compiler=lambda *_: part).exit_code == 0


def test_what_a_missing_compiler_would_have_checked_is_reported():
    checked = check(Path(LOCK), compiler=missing)
    (finding,) = checked.findings
    assert checked.exit_code == 0
    assert checked.found.compiled is None
    assert finding.text() == (
        "info SW603: What was not checked is reported, with the reason.\n"
        f"  where  {LOCK}\n"
        "  found  the collectives and the memory of the program compiled for cpu:8: not checked\n"
        "  needed compiling needs the package 'libtpu', which is not installed. Install it with: ..."
    )


def test_without_a_compiler_only_an_unmoved_plan_is_written():
    Path("mine.yaml").write_text(LAYOUT.replace("expert: 4}", "expert: 4, later: 1}") + "  later: data\n", "utf-8")
    assert check(Path(LOCK), compiler=missing, update=True).written
    held = json.loads(Path(LOCK).read_text(encoding="utf-8"))
    assert (held["mesh"], held["compiled"]) == ({"fsdp": 2, "expert": 4, "later": 1}, PART)
    before = Path(LOCK).read_bytes()
    Path("mine.yaml").write_text(MOVED, encoding="utf-8")
    checked = check(Path(LOCK), compiler=missing, update=True)
    assert checked.exit_code == 2
    assert checked.error == (
        f"{LOCK}: the plan moved, and so did the program for cpu:8 with it, which cannot be compiled here: compiling needs "
        "the package 'libtpu', which is not installed. Install it with: ...\nNothing was written. Update it where it can "
        "be compiled, or write a lock of the plan alone: shardwright lock mixtral-test --layout mine.yaml --chips "
        f"cpu:8 --set num_layers=2 --out {LOCK}"
    )
    assert Path(LOCK).read_bytes() == before


def test_a_program_that_does_not_fit_is_an_error_and_not_compared():
    checked = check(Path(LOCK), compiler=too_large, update=True)
    assert checked.exit_code == 1
    assert [finding.code for finding in checked.findings] == ["SW312", "SW603"]
    assert not checked.written


def test_a_plan_with_an_error_is_not_compiled():
    wide = LAYOUT.replace("fsdp: 2, expert: 4}", "fsdp: 1, expert: 8}").replace("context", "tensor")
    Path("mine.yaml").write_text(wide, encoding="utf-8")

    def never(*_):
        raise AssertionError

    codes = [finding.code for finding in check(Path(LOCK), compiler=never).findings]
    assert codes[-2:] == ["SW603", "SW601"]
    assert "SW107" in codes


def test_more_simulated_devices_than_this_process_has_are_reported(capsys):
    change(Path(LOCK), lambda lock: lock["request"].update(mesh={"fsdp": 4}, chips="cpu:16"))
    change(Path(LOCK), lambda lock: lock["compiled"].update(target="cpu:16"))
    assert main(["check", "--json"]) == 1
    skipped = json.loads(capsys.readouterr().out)["findings"][0]
    assert (skipped["code"], skipped["needed"]) == (
        "SW603",
        "16 simulated devices, and this process has 8. Check this lock alone.",
    )


def test_versions_are_those_of_what_compiles_for_the_target(monkeypatch):
    def number(package):
        return {"jax": "1", "jaxlib": "2", "libtpu": "3", "jax-cuda13-plugin": "4"}.get(package)

    monkeypatch.setattr(locked_program, "installed_version", number)
    assert locked_program.versions(read_machine("cpu:8")) == {"jax": "1", "jaxlib": "2"}
    assert locked_program.versions(read_machine("v5p:2x2x2")) == {"jax": "1", "jaxlib": "2", "libtpu": "3"}
    assert locked_program.versions(read_machine("h100:1x8")) == {"jax": "1", "jaxlib": "2", "jax-cuda13-plugin": "4"}


def test_a_program_is_compiled_locked_and_compiled_again(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    assert jax.device_count() == 8
    step = ["--set", "num_layers=1", "--batch", "8", "--length", "16", "--chips", "cpu:8"]
    assert main(["lock", "llama3-test", "--layout", "fsdp", *step, "--compiled", "--out", "c.json"]) == 0
    out = capsys.readouterr().out
    held = json.loads(Path("c.json").read_text(encoding="utf-8"))
    compiled = held["compiled"]
    assert f"  compiled     {len(compiled['collectives'])} collectives of the program for cpu:8" in out
    assert (compiled["target"], set(compiled["versions"])) == ("cpu:8", {"jax", "jaxlib"})
    # The embedding is gathered whole, once, as the plan's own row says.
    rows = [[row for row in part["collectives"] if row["component"] == "embedding"] for part in (held, compiled)]
    for planned, found in zip(*(sorted(part, key=lambda row: row["phase"]) for part in rows), strict=True):
        for name in ("kind", "phase", "axes", "bytes_per_device", "count_per_step"):
            assert planned[name] == found[name]
    assert main(["check", "c.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checked"][0]["difference"]["compiled"]["collectives"] == []
    change(Path("c.json"), lambda lock: lock["compiled"]["collectives"].pop())
    assert main(["check", "c.json"]) == 1
    assert "compiled for cpu:8: collectives that differ\n" in capsys.readouterr().out
    assert main(["lock", "llama3-test", "--layout", "fsdp", *step, "--out", "c.json"]) == 0
    text = "  compiled     nothing: the program for cpu:8 is no longer held; --compiled holds it\n"
    assert text in capsys.readouterr().out


def test_a_target_is_needed_to_compile(capsys):
    assert main([*LOCKING, "--compiled", "--out", "d.json"]) == 2
    assert "--chips" in capsys.readouterr().err
    assert not Path("d.json").exists()


def test_a_program_of_another_target_than_the_request(capsys):
    change(Path(LOCK), lambda lock: lock["compiled"].update(target="v5p:2x2x1"))
    assert main(["check"]) == 2
    assert capsys.readouterr().err == (
        f"shardwright: {LOCK}: this lock disagrees with itself: its program was compiled for 'v5p:2x2x1', and its 'request' has "
        "'cpu:8'. Something else has changed it. Write it anew: shardwright lock mixtral-test --layout mine.yaml --chips cpu:8 "
        f"--set num_layers=2 --out {LOCK} --compiled\n"
    )
