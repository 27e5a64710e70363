"""`shardwright calibrate`: numbers of the chips that are there, measured at a plan's sizes, in a file that --chips takes.

The measurements and the short runs are each a process of their own: JAX counts its devices when it starts, and ranks are started for
PyTorch. Their times are read from files.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from shardwright.cli.running.ranks import is_rank, launch
from shardwright.cli.typed.devices import leave_out_absent_tpus, simulate_devices
from shardwright.cli.typed.extras import needing_extra
from shardwright.cli.typed.model_file import with_named_model
from shardwright.cli.typed.output import write_json
from shardwright.cli.typed.request import TypedRequest, as_typed, options_text, planned, requested, typed_request
from shardwright.cli.typed.values import settings
from shardwright.cli.typed.verbs import CalibrateVerb
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.plan.plan import Plan
from shardwright.cost import price
from shardwright.cost.calibration import Measured, ShortRun, file_text, fitted, machine_without_numbers, wanted
from shardwright.cost.hardware.chips import CPU, ChipNumbers
from shardwright.cost.hardware.machine import Machine
from shardwright.files import replace_text
from shardwright.report.text.units import pretty_seconds
from shardwright.training.cluster import CommandLine, find_processes
from shardwright.training.options import METRICS_FILE

MEASURING = "SHARDWRIGHT_MEASURING"
"""Where the process that measures writes what it found; set in that process alone."""
RUN = "import sys; from shardwright.cli.main import main; sys.exit(main(sys.argv[1:]))"
SHORT_STEPS = 14
SETTLED = 4
"""Steps of a short run that are not counted: the first ones compile, and allocate."""


def run_calibrate(verb: CalibrateVerb, arguments: Sequence[str]) -> int:
    """Measure and write the file. Returns 1 if a process that measured failed; it has said why."""
    if verb.repeats < 1:
        raise InputError(f"--repeats is {verb.repeats}, and must be at least 1.")
    verb = with_named_model(verb, shows=MEASURING not in os.environ, has_findings=False)
    typed = requested(verb.model, verb.layout, verb.plan)
    plan = planned(typed)
    if plan.errors:
        raise FindingsError(plan.errors)
    if MEASURING in os.environ:
        _measure(plan, verb, Path(os.environ[MEASURING]))
        return 0
    if verb.out.is_dir() or not verb.out.parent.is_dir():
        raise InputError(
            f"--out {verb.out}: no file can be written there. Give the name of a file in a folder that exists."
        )
    with tempfile.TemporaryDirectory() as folder:
        found = _measured(plan, arguments, Path(folder))
        if found is None:
            return 1
        runs = [
            run for layers in _short(plan) if (run := _short_run(verb, typed, plan, layers, arguments, Path(folder)))
        ]
    before = _machine(typed, plan)
    today = datetime.now(tz=UTC).date().isoformat()
    chip = fitted(plan, before, found, runs, today)
    about = (
        f"Measured on {socket.gethostname()}, {today}: shardwright {' '.join(arguments)}",
        "Take it with --chips KIND:SHAPE+FILE. 'measured' has seconds (the lower quartile), how far three of four repetitions were off, and their number.",
    )
    replace_text(verb.out, file_text(chip, about, found, runs))
    _say(verb, before, chip, plan, found, runs)
    return 0


def _measure(plan: Plan, verb: CalibrateVerb, out: Path) -> None:
    """In the process that measures: on JAX's devices, or as one of PyTorch's ranks."""
    if plan.request.engine == "torch":
        none = CommandLine(coordinator=None, count=None, index=None)
        processes, _ = find_processes(none, os.environ, socket.getfqdn, "torch")
        with needing_extra("torch", "measuring with PyTorch"):
            found = import_module("shardwright.engine_torch.training.measure").measure(
                plan, wanted(plan), verb.repeats, processes
            )
        first = processes is None or processes.index == 0
    else:
        with needing_extra("jax", "measuring with JAX"):
            found = import_module("shardwright.engine_jax.training.measure").measure(plan, wanted(plan), verb.repeats)
        first = True
    if first:
        out.write_text(json.dumps([asdict(one) for one in found]), encoding="utf-8")


def _measured(plan: Plan, arguments: Sequence[str], folder: Path) -> list[Measured] | None:
    out, count = folder / "measured.json", plan.mesh.num_devices
    before = dict(os.environ)
    os.environ[MEASURING] = str(out)
    try:
        if plan.request.engine == "torch" and count > 1 and not is_rank(os.environ):
            code = launch(count, arguments, folder)
        else:
            environment = dict(os.environ)
            simulate_devices(count, environment, jax_is_loaded=False)
            leave_out_absent_tpus(environment, jax_is_loaded=False)
            code = subprocess.run(
                [sys.executable, "-P", "-c", RUN, *arguments], env=environment, check=False, stdout=subprocess.DEVNULL
            ).returncode
    finally:
        os.environ.clear()
        os.environ.update(before)
    if code or not out.exists():
        return None
    rows = json.loads(out.read_text(encoding="utf-8"))
    return [Measured(**{**row, "seconds": tuple(row["seconds"])}) for row in rows]


def _short(plan: Plan) -> tuple[int, ...]:
    """Numbers of layers of the short runs: one and three, after layers without experts where a model begins with some."""
    stacks = {weight.stack: weight.num for weight in plan.request.table.weights if weight.stack is not None}
    first = sum(list(stacks.values())[:-1])
    return tuple(layers for layers in (first + 1, first + 3) if layers < plan.request.table.num_layers)


def _short_run(
    verb: CalibrateVerb, typed: TypedRequest, plan: Plan, layers: int, arguments: Sequence[str], folder: Path
) -> ShortRun | None:
    """A run of so many layers; None where it failed, which it has said."""
    dimensions = settings(verb.plan.set) | {"num_layers": str(layers)}
    given = [f"{name}={value}" for name, value in dimensions.items()]
    layout, options = as_typed(typed, verb.layout, verb.plan)
    short = typed_request(verb.model, layout, replace(options, set=(tuple(given),)))
    out = folder / f"layers{layers}"
    command = ["train", *_plan_arguments(arguments), *options_text(typed.for_chips).split(), "--set", *given]
    command += ["--steps", str(SHORT_STEPS), "--out", str(out), "--devices", str(plan.mesh.num_devices)]
    environment = {name: value for name, value in os.environ.items() if name != MEASURING}
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN, *command], env=environment, check=False, stdout=subprocess.DEVNULL
    )
    if done.returncode:
        return None
    steps = [json.loads(line) for line in (out / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
    seconds = tuple(step["step_s"] for step in steps if "step_s" in step)[SETTLED:]
    return ShortRun(plan=planned(replace(short, machine=None)), layers=layers, seconds=seconds)


def _plan_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a plan, without those of `calibrate` alone, and without chips, devices and dimensions.

    >>> _plan_arguments("calibrate mixtral-test --set num_layers=6 embed=64 --mesh fsdp=2 --out mine.toml".split())
    ['mixtral-test', '--mesh', 'fsdp=2']
    """
    kept, skip, dimensions = [], 0, False
    for word in arguments[1:]:
        name = word.partition("=")[0]
        # --set takes every NAME=VALUE that follows.
        dimensions = name == "--set" or (dimensions and "=" in word and not word.startswith("-"))
        if skip:
            skip -= 1
        elif name in ("--out", "--repeats", "--chips", "--devices"):
            skip = 0 if "=" in word else 1
        elif name != "--json" and not dimensions:
            kept.append(word)
    return kept


def _machine(typed: TypedRequest, plan: Plan) -> Machine:
    """The machine of --chips, or the simulated devices of this one."""
    if typed.machine is not None and typed.machine.numbers is not None:
        return typed.machine
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return machine_without_numbers(plan.mesh.num_devices, memory)


def _say(
    verb: CalibrateVerb,
    before: Machine,
    chip: ChipNumbers,
    plan: Plan,
    found: Sequence[Measured],
    runs: Sequence[ShortRun],
) -> None:
    """What was measured, and the estimates before and after."""
    after = replace(before, numbers=chip)
    known = before.numbers is not None and before.numbers.kind != CPU
    estimates = [
        {
            "layers": layers,
            "measured_seconds": seconds,
            "before_seconds": _estimate(one, before) if known else None,
            "after_seconds": _estimate(one, after),
        }
        for one, layers, seconds in (
            *((run.plan, run.layers, run.typical) for run in runs),
            (plan, plan.request.table.num_layers, None),
        )
    ]
    if verb.plan.json:
        measured = [{**asdict(one), "typical": one.typical, "spread": one.spread} for one in found]
        write_json({"file": str(verb.out), "measured": measured, "estimates": estimates})
        return
    for one in found:
        rate = "" if one.what not in ("product", "copy") else f"  {one.amount / one.typical:.3g} a second"
        sys.stdout.write(f"{one.what:<19} {one.size:<44} {pretty_seconds(one.typical):>8} +-{one.spread:.0%}{rate}\n")
    for estimate in estimates:
        words = [f"a step of {estimate['layers']} layers:"]
        for name in ("measured", "before", "after"):
            seconds = estimate[f"{name}_seconds"]
            words.append(f"{name} {'-' if seconds is None else pretty_seconds(seconds)}")
        sys.stdout.write(" ".join(words) + "\n")
    chips = verb.plan.chips or f"{CPU}:{plan.mesh.num_devices}"
    sys.stdout.write(f"written: {verb.out}; take it with --chips {chips}+{verb.out}\n")


def _estimate(plan: Plan, machine: Machine) -> float | None:
    step = price(plan, machine).step
    return None if step is None else step.seconds
