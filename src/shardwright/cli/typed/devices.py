"""The devices of a run: those that are there, and simulated ones, whose flag must be set before JAX starts."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from dataclasses import replace
from importlib import import_module
from math import prod

from shardwright.cli.typed.extras import needing_extra
from shardwright.cli.typed.values import settings
from shardwright.cli.typed.verbs import TrainVerb
from shardwright.core.resolution.mesh_sizes import fitted_sizes
from shardwright.layouts import load_layout
from shardwright.models import build
from shardwright.training.cluster import Processes

SIMULATED_DEVICES = "--xla_force_host_platform_device_count"


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


def on_present_devices(verb: TrainVerb, engine: str, processes: Processes | None) -> tuple[TrainVerb, dict[str, str]]:
    """The verb with a mesh of the devices that are there, where it names none, and that default by its option.

    Processes of JAX know of each other's devices only when they have met: among them the mesh stays the model's natural one.
    """
    options = verb.plan
    if options.mesh is not None or options.devices is not None or options.chips is not None:
        return verb, {}
    if processes is None:
        with needing_extra(engine, f"training on {'PyTorch' if engine == 'torch' else 'JAX'}"):
            devices = import_module(f"shardwright.engine_{engine}.io.mesh").count_devices()
    elif engine == "torch":
        devices = processes.count
    else:
        return verb, {}
    table = build(verb.model, settings(options.set))
    natural = {} if verb.layout is not None else dict(table.natural_mesh or {})
    if prod(natural.values()) != devices or not natural:
        natural = fitted_sizes(load_layout(verb.layout or table.natural_layout), devices)
    mesh = ",".join(f"{axis}={size}" for axis, size in natural.items())
    there = f"{devices} {'device is' if devices == 1 else 'devices are'} there"
    return replace(verb, plan=replace(options, mesh=mesh)), {"--mesh": f"{mesh} ({there})"}
