"""The same command line is the same request under every verb, and what is chosen for chips is held by what is written."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from shardwright.cli.main import main
from shardwright.cli.typed import request as requests
from shardwright.cli.typed.request import TypedRequest
from tests.cli.locks import change, typing
from tests.cli.one_request import differing, drawn_tail, resolved
from tests.matrix import rest

CHIPS = ("mixtral-8x7b", "--chips", "h100:4x8")


@pytest.fixture
def typed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return typing(capsys)


@pytest.mark.parametrize("number", [*range(5), *(rest(number) for number in range(5, 100))])
def test_a_command_line_is_one_request_under_every_verb(number: int):
    assert list(differing(drawn_tail(random.Random(f"tails.{number}")))) == []


def test_what_is_chosen_for_chips_is_chosen_under_every_verb():
    planned = resolved("plan", CHIPS)
    assert isinstance(planned, TypedRequest)
    assert set(planned.for_chips) >= {"--layout", "--mesh", "--batch"}
    # They are not the model's own.
    assert planned.request.batch != planned.request.table.natural_batch
    for verb, more in (("lock", ()), ("compile", ()), ("train", ("--steps", "1", "--out", "run"))):
        other = resolved(verb, (*CHIPS, *more))
        assert isinstance(other, TypedRequest)
        assert other.request == planned.request, verb


def test_a_lock_says_and_holds_what_was_chosen(typed, monkeypatch):
    code, out, _ = typed("lock", *CHIPS, "--out", "a.lock.json")
    assert code == 0
    planned = resolved("plan", CHIPS)
    assert isinstance(planned, TypedRequest)
    chosen = " ".join(f"{option} {value}" for option, value in planned.for_chips.items())
    assert f"\n  chosen       {chosen}, for h100:4x8; held as if typed\n" in out
    held = json.loads(Path("a.lock.json").read_text(encoding="utf-8"))["request"]
    assert (held["layout"], held["mesh"], held["batch"]) == (
        planned.request.layout.name,
        planned.request.mesh_sizes,
        planned.request.batch,
    )
    assert not {"layout", "mesh", "batch"} & set(held["by_default"])

    # A later release would choose otherwise; it is not asked.
    monkeypatch.setattr(requests, "with_choice", lambda *_: pytest.fail("chosen anew"))
    before = Path("a.lock.json").read_bytes()
    assert typed("check", "a.lock.json")[:2][0] == 0
    assert typed("check", "--update", "a.lock.json")[0] == 0
    assert Path("a.lock.json").read_bytes() == before


def test_a_lock_of_the_natural_layout_on_chips_stays_what_it_is(typed):
    """As releases wrote it that chose nothing for chips."""
    natural = ("--layout", "ep", "--mesh", "data=1,fsdp=2,expert=4", "--batch", "8")
    tail = ("mixtral-test", "--chips", "h100:1x8")
    assert typed("lock", *tail, *natural, "--out", "a.lock.json")[0] == 0
    change(
        Path("a.lock.json"),
        lambda lock: lock["request"]["by_default"].__setitem__(slice(0), ["layout", "mesh", "batch"]),
    )
    assert typed("check", "a.lock.json")[0] == 0
    planned = resolved("plan", tail)
    assert isinstance(planned, TypedRequest)
    assert planned.request.layout.name != "ep"


def test_a_plan_and_the_lock_of_the_same_command_do_not_differ(typed):
    typed("lock", *CHIPS, "--out", "a.lock.json")
    Path("a.json").write_text(typed("plan", *CHIPS, "--json")[1], encoding="utf-8")
    _, out, _ = typed("diff", "a.json", "a.lock.json", "--json")
    found = json.loads(out)
    assert not found["moved"]
    assert not [change for change in found["said"] if change["where"].startswith("choices")]


def test_layouts_that_are_compared_have_the_same_rows_and_say_which_were_chosen(typed):
    """32 devices share the rows of one, 8 of the other, which would be 8 alone."""
    sides = ("fsdp", "ep-as-cp:fsdp=8,expert=4", "--model", "mixtral-8x7b", "--chips", "h100:4x8", "--json")
    found = json.loads(typed("diff", *sides)[1])
    assert found["before"]["batch"] == found["after"]["batch"] == 32
    assert found["chosen"] == {"before": {"--batch": "32"}, "after": {"--batch": "32"}}
    _, out, _ = typed("diff", *sides[:-1])
    assert out.count("   --batch 32: chosen for h100:4x8\n") == 2
    _, out, _ = typed("diff", *sides[:-1], "--batch", "64")
    assert "chosen for" not in out


def test_a_run_holds_what_was_chosen_for_its_chips(monkeypatch):
    """`train --resume RUN` types it again."""
    from shardwright.cli.running import train

    held = {}

    class StoppedError(Exception):
        pass

    def stopped(run, *_):
        held["arguments"] = run.arguments
        raise StoppedError

    monkeypatch.setattr(train, "_engine", lambda _: stopped)
    monkeypatch.setenv("XLA_FLAGS", "")
    tail = ("llama3-test", "--chips", "h100:1x8", "--steps", "1", "--out", "run")
    with pytest.raises(StoppedError):
        main(["train", *tail, "--json"])
    planned = resolved("plan", tail[:3])
    assert isinstance(planned, TypedRequest)
    words = " ".join(held["arguments"])
    assert all(f"{option} {value}" in words for option, value in planned.for_chips.items())


def drawn_open_meshes() -> list[tuple[str, str, str, int]]:
    """A layout, the same mesh with `auto` and in numbers, and the devices."""
    draw, meshes = random.Random(7), []
    axes = {"hsdp": ("data", "fsdp"), "fsdp-tp": ("data", "fsdp", "tensor"), "ep": ("data", "fsdp", "expert")}
    for _ in range(6):
        layout = draw.choice(list(axes))
        sizes = {axis: draw.choice((1, 2, 4)) for axis in axes[layout]}
        auto = draw.choice(axes[layout])
        devices = 1
        for size in sizes.values():
            devices *= size
        texts = [
            ",".join(f"{axis}={'auto' if number and axis == auto else size}" for axis, size in sizes.items())
            for number in (1, 0)
        ]
        meshes.append((layout, *texts, devices))
    return meshes


@pytest.mark.parametrize(("layout", "opened", "numbers", "devices"), drawn_open_meshes())
def test_an_open_axis_is_what_is_left_under_every_verb(typed, layout, opened, numbers, devices):
    tail = ("mixtral-test", "--layout", layout, "--devices", str(devices), "--set", "num_layers=1")
    for name, mesh in (("a", opened), ("b", numbers)):
        assert typed("lock", *tail, "--mesh", mesh, "--out", f"{name}.lock.json")[0] == 0
        Path(f"{name}.json").write_text(typed("plan", *tail, "--mesh", mesh, "--json")[1], encoding="utf-8")
    assert typed("check", "a.lock.json", "b.lock.json")[0] == 0
    pairs = [("a.lock.json", "b.lock.json"), ("a.json", "a.lock.json"), (f"{layout}:{opened}", f"{layout}:{numbers}")]
    for before, after in pairs:
        model = () if before.endswith(".json") else ("--model", *tail[:1], *tail[3:])
        assert not json.loads(typed("diff", before, after, *model, "--json")[1])["moved"]
    assert not json.loads(
        typed("diff", layout, "b.json", "--model", *tail[:1], *tail[3:], "--mesh", opened, "--json")[1]
    )["moved"]


def test_a_fix_keeps_the_open_axis_that_was_typed(typed):
    """Typed in its place, it gives a plan: the layout's own size of that axis is another."""
    tail = ("plan", "mixtral-test", "--layout", "ep", "--devices", "8")
    _, _, err = typed(*tail, "--mesh", "fsdp=3,expert=auto")
    fix = err.partition("  fix    ")[2].splitlines()[0]
    assert fix == "--mesh fsdp=2,expert=auto"
    assert typed(*tail, *fix.split())[0] == 0


def test_an_open_axis_of_a_run_takes_the_devices_that_are_there(monkeypatch):
    from shardwright.engine_jax.io import mesh

    monkeypatch.setattr(mesh, "count_devices", lambda: 4)
    words = ("llama3-test", "--layout", "hsdp", "--mesh", "data=2,fsdp=auto", "--steps", "1", "--out", "run")
    found = resolved("train", words)
    assert isinstance(found, TypedRequest)
    assert found.request.devices == 4
