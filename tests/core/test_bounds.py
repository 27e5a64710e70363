"""The largest numbers that are accepted, and the work of planning for them: no more than for 8 devices."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import FrameType

import pytest

from shardwright.core.engines.engines import Engine
from shardwright.core.findings.bounds import BOUNDS, integer_of, within
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.layout.reading import read_layout
from shardwright.core.planning import make_plan, resolve
from shardwright.core.resolution.own_model import table_of
from shardwright.core.resolution.request import Chip, Request
from shardwright.cost import read_machine
from shardwright.files import parse_yaml
from shardwright.layouts import load_layout
from shardwright.models import build
from shardwright.training.cluster import CommandLine, find_processes
from shardwright.training.options import RunOptions


def ringed(devices: int, engine: Engine, *, balanced: bool = True) -> Request:
    """A plan in which keys and tokens are sent around rings of so many devices."""
    return Request(
        layout=replace(load_layout("ep-as-cp"), move_attention="ring", move_moe="ring"),
        table=build("deepseek3-test"),
        batch=8,
        length=1 << 22,
        mesh_sizes={"data": 1, "fsdp": 1, "expert": devices},
        engine=engine,
        load_balanced=balanced,
    )


def calls_of(work: Callable[[], object]) -> int:
    """Calls of functions, of generators each time that they go on, and of built-in functions."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        del frame, argument
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_ring_of_many_devices_is_planned_with_the_work_of_one_of_8(engine) -> None:
    few, many = ringed(8, engine), ringed(8192, engine)
    plan = resolve(many)
    # Without the findings, whose fixes are tried one by one: how many there are depends on the sizes.
    work = [calls_of(lambda one=one: resolve(one)) for one in (few, many)]
    assert work[1] < 1.2 * work[0], work
    rounds = {c.phase: c.count_per_step for c in plan.collectives if c.kind == "permute"}
    layers = plan.request.table.num_layers
    assert rounds == dict.fromkeys(("forward", "recompute", "backward"), 8191 * layers)


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_as_long_with_its_checks(engine) -> None:
    # Both the best of three in one run, on whatever machine; what grows with the devices would be a thousand times more.
    seconds = []
    for devices in (8, 8192):
        request = replace(
            ringed(8, engine),
            layout=replace(load_layout("cp"), move_attention="ring"),
            table=build("llama3-405b"),
            mesh_sizes={"data": 1, "fsdp": 1, "context": devices},
        )
        taken = []
        for _ in range(3):
            start = perf_counter()
            make_plan(request)
            taken.append(perf_counter() - start)
        seconds.append(min(taken))
    assert seconds[1] < 20 * seconds[0] + 0.5, seconds


def test_a_tensor_is_named_once_in_a_collective() -> None:
    for request in (ringed(64, "jax"), ringed(64, "torch")):
        for one in make_plan(request).collectives:
            assert len(set(one.tensors)) == len(one.tensors), one


def request_with(**changes: object) -> Request:
    return replace(ringed(8, "jax"), **changes)  # pyright: ignore[reportArgumentType]


def run_with(**changes: object) -> RunOptions:
    return RunOptions(**{"steps": 10, "out": Path("out"), **changes})  # pyright: ignore[reportArgumentType]


CHIP = Chip(name="C", usable_bytes=1 << 40, source="s")

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "rows": (
        lambda: request_with(batch=10**9),
        "batch is 1,000,000,000, and must be at most 16,777,216. Give fewer rows.",
    ),
    "tokens": (
        lambda: request_with(length=10**5000),
        "length is above 10^20, and must be at most 134,217,728. Give shorter rows.",
    ),
    "training tokens": (
        lambda: request_with(training_tokens=10**20, chip=CHIP),
        "--tokens is above 10^20, and must be at most 1,000,000,000,000,000,000. Give fewer tokens.",
    ),
    "microbatches": (
        lambda: request_with(microbatches=10**12),
        "microbatches is 1,000,000,000,000, and must be at most 16,777,216. Give fewer microbatches.",
    ),
    "devices": (
        lambda: request_with(devices=10**12),
        "devices is 1,000,000,000,000, and must be at most 1,048,576. Give fewer devices.",
    ),
    "devices of an axis": (
        lambda: request_with(mesh_sizes={"fsdp": 1 << 21}),
        "the size of mesh axis 'fsdp' is 2,097,152, and must be at most 1,048,576. Give fewer devices.",
    ),
    "devices of a machine": (
        lambda: read_machine("h100:1000000x8"),
        "--chips: the number of devices of 'h100:1000000x8' is 8,000,000, and must be at most 1,048,576. Give fewer "
        "devices.",
    ),
    "chunks": (
        lambda: request_with(loss_chunks=10**9),
        "loss_chunks is 1,000,000,000, and must be at most 16,777,216. Give fewer chunks.",
    ),
    "layers": (
        lambda: build("llama3-8b", {"num_layers": "1000000"}),
        "llama3-8b with --set num_layers=1000000: num_layers is 1,000,000, and must be at most 16,384. Give fewer layers.",
    ),
    "layers of an own model": (
        lambda: table_of({"w": ((1 << 20, 8), "float32")}, {"w": "mlp: layers embed"}),
        "own: num_layers is 1,048,576, and must be at most 16,384. Give fewer layers.",
    ),
    "elements": (
        lambda: build("llama3-8b", {"vocab": "9" * 5000}),
        f"llama3-8b with --set vocab={'9' * 5000}: vocab is above 10^20, and must be at most 4,294,967,296. Give a "
        f"smaller dim.",
    ),
    "elements of an own model": (
        lambda: table_of({"w": ((8, 10**30), "float32")}, {"w": "mlp: embed mlp"}),
        "own: 'mlp' of 'w' is above 10^20, and must be at most 4,294,967,296. Give a smaller dim.",
    ),
    "steps": (
        lambda: run_with(steps=30_000_000_000),
        "--steps is 30,000,000,000, and must be at most 1,000,000,000. Give fewer steps.",
    ),
    "steps between checkpoints": (
        lambda: run_with(checkpoint_every=1 << 64),
        "--checkpoint-every is 18,446,744,073,709,551,616, and must be at most 1,000,000,000. Give fewer steps.",
    ),
    "checkpoints": (
        lambda: run_with(keep=1 << 40),
        "--keep is 1,099,511,627,776, and must be at most 1,000,000,000. Leave it out: all checkpoints are then kept.",
    ),
    "hours": (
        lambda: run_with(keep_every_hours=10**7),
        "--keep-every-hours is 10,000,000, and must be at most 1,000,000. Give fewer hours.",
    ),
    "rate": (lambda: run_with(lr=1e308), "--lr is 1e+308, and must be at most 1,000,000. Give a lower rate."),
    "rate of decay": (
        lambda: run_with(weight_decay=1e39),
        "--weight-decay is 1e+39, and must be at most 1,000,000. Give a lower rate.",
    ),
    "norm": (
        lambda: run_with(clip=1e300),
        "--clip is 1e+300, and must be at most 1,000,000,000,000,000,000. Give a smaller norm: nothing is clipped at "
        "this one.",
    ),
    "seconds": (
        lambda: find_processes(CommandLine(count=2, join_timeout_s=10**11), {}, str),
        "--join-timeout is 100,000,000,000, and must be at most 1,000,000. Give a shorter time.",
    ),
    "processes": (
        lambda: find_processes(CommandLine(count=10**10), {}, str),
        "--processes is 10,000,000,000, and must be at most 1,048,576. Give fewer processes.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_number_above_its_bound(name) -> None:
    make, message = REFUSED[name]
    with pytest.raises(InputError) as refused:
        make()
    assert str(refused.value) == message


ELSEWHERE = {
    # Counted where a layout is read, with its place.
    "axes",
    # Of a text of TOML: tests/interop/test_torchtitan_reading.py.
    "digits",
    "levels",
    # Of paths, and of the headers of files: tests/cli/test_bounds_of_names.py.
    "name of a file",
    "path",
    "tensors",
}


def test_every_bound_refuses_something() -> None:
    assert set(BOUNDS) == {name if name in BOUNDS else name.partition(" ")[0] for name in REFUSED} | ELSEWHERE


@pytest.mark.parametrize("counted", BOUNDS)
def test_a_bound_itself_is_accepted(counted) -> None:
    within("this", BOUNDS[counted].most, counted)
    with pytest.raises(InputError):
        within("this", BOUNDS[counted].most + (1 << 10), counted)


@pytest.mark.parametrize("value", [True, 2.0, "8", None, float("nan")])
@pytest.mark.parametrize("name", ["batch", "length", "microbatches"])
def test_values_that_are_not_integers(name, value) -> None:
    with pytest.raises(InputError, match=f"^{name} is .*, and must be a whole number of at least 1[.]$"):
        request_with(**{name: value})


@pytest.mark.parametrize("value", [True, "8", float("nan"), float("inf"), 0, -1.5])
def test_values_that_are_not_fractions(value) -> None:
    with pytest.raises(InputError, match=r"^expert_buffer is .*, and must be a finite number above 0[.]$"):
        request_with(expert_buffer=value)


def test_sizes_that_together_are_too_many_devices() -> None:
    with pytest.raises(FindingsError) as refused:
        make_plan(request_with(mesh_sizes={"data": 1024, "fsdp": 4096, "expert": 8}))
    (found,) = refused.value.findings
    assert (found.code, found.found, found.needed, found.fix) == (
        "SW106",
        "data 1024 x fsdp 4096 x expert 8 = 33554432",
        "at most 1048576 devices",
        "--mesh data=1024,fsdp=128,expert=8",
    )


@pytest.mark.parametrize(
    ("mesh", "found", "needed", "fix"),
    [
        (
            {"fsdp": 10**30},
            "size above 10^20",
            "at most 1,048,576",
            "Write 'fsdp: auto' for the remaining devices, or a smaller size.",
        ),
        (
            {f"a{number}": 1 for number in range(33)},
            "33 axes",
            "at most 32",
            "Give fewer axes: those of one role can be one axis.",
        ),
    ],
    ids=["a size", "axes"],
)
def test_a_layout_with_too_many(mesh, found, needed, fix) -> None:
    text = json.dumps({"name": "wide", "mesh": mesh, "roles": dict.fromkeys(mesh, "fsdp")})
    with pytest.raises(FindingsError) as refused:
        read_layout(parse_yaml(text, "wide.yaml"))
    (one,) = refused.value.findings
    assert (one.found, one.needed, one.fix) == (found, needed, fix)
    assert one.position is not None
    assert one.position.line == 1


def test_a_number_too_long_for_python() -> None:
    assert integer_of("-" + "9" * 5000) == -(10**100)
    with pytest.raises(ValueError, match="invalid literal"):
        integer_of("9" * 50 + "x")
