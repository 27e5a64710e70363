"""The devices of a run: those that are there, and simulated ones, whose flag must be set before JAX starts."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path

from shardwright.cli.typed.extras import needing_extra
from shardwright.cli.typed.values import mesh_sizes, settings
from shardwright.cli.typed.verbs import TrainVerb
from shardwright.core.engines.engines import ENGINES, Engine
from shardwright.core.resolution.mesh_sizes import fitted_sizes, mesh_text
from shardwright.layouts import load_layout
from shardwright.models import build
from shardwright.training.cluster import Processes

SIMULATED_DEVICES = "--xla_force_host_platform_device_count"

CHOOSE_PLATFORMS = ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "TPU_LIBRARY_PATH", "PJRT_NAMES_AND_LIBRARY_PATHS")
"""Environment variables that say to JAX what it uses."""

ACCELERATORS = ("accel*", "vfio/*", "nvidia*", "kfd", "dri/*", "dxg")
"""Device files of TPUs and GPUs, below /dev."""


def simulate_devices(devices: int | None, environment: MutableMapping[str, str], *, jax_is_loaded: bool) -> None:
    """Have JAX's CPU backend simulate ``devices`` devices, by a flag that XLA reads once, when JAX starts.

    Changes nothing if ``devices`` is None, if JAX has started, or if JAX_PLATFORMS leaves the CPU out. The flag is put
    after those in XLA_FLAGS, and replaces one with another number.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if devices is None or jax_is_loaded or (platforms and "cpu" not in platforms.split(",")):
        return
    others = re.sub(rf"{SIMULATED_DEVICES}=\S*", "", environment.get("XLA_FLAGS", "")).split()
    environment["XLA_FLAGS"] = " ".join([*others, f"{SIMULATED_DEVICES}={devices}"])


def leave_out_absent_tpus(
    environment: MutableMapping[str, str], *, jax_is_loaded: bool, dev: Path = Path("/dev")
) -> None:
    """Have JAX use the CPU where libtpu is installed and no accelerator is there: libtpu prints what it misses.

    Changes nothing if JAX has started, if a variable says what JAX uses, or if there is a device file of a TPU or a GPU.
    """
    if jax_is_loaded or any(environment.get(name) for name in CHOOSE_PLATFORMS) or find_spec("libtpu") is None:
        return
    if not any(path for pattern in ACCELERATORS for path in dev.glob(pattern)):
        environment["JAX_PLATFORMS"] = "cpu"


def on_present_devices(
    verb: TrainVerb, engine: Engine, processes: Processes | None
) -> tuple[TrainVerb, dict[str, str]]:
    """The verb with a mesh of the devices that are there, where it names none or has ``auto``, and that default by its option.

    Processes of JAX know of each other's devices only when they have met: among them the mesh stays the model's natural one.
    """
    options = verb.plan
    if options.devices is not None or options.chips is not None:
        return verb, {}
    automatic = options.mesh is not None and "auto" in mesh_sizes(options.mesh).values()
    if options.mesh is not None and not automatic:
        return verb, {}
    if processes is None:
        with needing_extra(engine, f"training on {ENGINES[engine].framework}"):
            devices = import_module(f"shardwright.engine_{engine}.io.mesh").count_devices()
    elif engine == "torch":
        devices = processes.count
    else:
        return verb, {}
    there = f"{devices} {'device is' if devices == 1 else 'devices are'} there"
    if automatic:
        return replace(verb, plan=replace(options, devices=devices)), {"--devices": f"{devices} ({there})"}
    table = build(verb.model, settings(options.set))
    natural = {} if verb.layout is not None else dict(table.natural_mesh or {})
    if prod(natural.values()) != devices or not natural:
        natural = fitted_sizes(load_layout(verb.layout or table.natural_layout), devices)
    mesh = mesh_text(natural)
    return replace(verb, plan=replace(options, mesh=mesh)), {"--mesh": f"{mesh} ({there})"}
