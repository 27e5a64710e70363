"""Devices to compile for that this machine does not have: descriptions for a compiler, on which nothing can run.

libtpu describes TPUs; JAX's CUDA plugin describes NVIDIA GPUs from a text specification of the chip. Neither needs
hardware or a driver. Simulated devices are this machine's CPU devices.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from shardwright.core.findings.errors import InputError
from shardwright.core.installed import installed_version
from shardwright.core.mesh.mesh import Mesh
from shardwright.cost import Machine
from shardwright.engine_jax.io.mesh import in_torus_order

GPU_TABLE = Path(__file__).parent / "gpu_targets.toml"
TPU_EXTRA, GPU_EXTRA = "tpu", "gpu-compile"
HOST_CHIPS = (2, 2, 1)
"""The chips of one host. A slice consists of entire hosts; a smaller slice is one host."""


def target_mesh(mesh: Mesh, machine: Machine) -> jax.sharding.Mesh:
    """The mesh over the machine's devices in their order: device ``d`` has the coordinates that the core gives it.

    Raises InputError where a package that the compiler needs is not installed, or does not support such a machine.
    """
    devices = devices_of(machine)
    assert len(devices) == mesh.num_devices, (len(devices), mesh)
    return jax.sharding.Mesh(np.array(devices).reshape([axis.size for axis in mesh.axes]), mesh.names)


def devices_of(machine: Machine) -> Sequence[Any]:
    """All devices of the machine; those of a TPU or GPU can only be compiled for."""
    if machine.numbers is None:
        return jax.devices("cpu")[: machine.num_devices]
    if machine.numbers.network == "torus":
        return _tpus(machine)
    return _gpus(machine)


def _tpus(machine: Machine) -> Sequence[Any]:
    assert machine.numbers is not None
    _require("libtpu", TPU_EXTRA, "compiling for TPU")
    kind, shape = machine.numbers.kind, machine.shape
    hosts = HOST_CHIPS[: len(shape)]
    options: dict[str, Any] = {}
    if any(size % host for size, host in zip(shape, hosts, strict=True)):
        options["chips_per_host_bounds"] = (*(min(pair) for pair in zip(shape, hosts, strict=True)), 1)[:3]
    if kind == "v4":
        # One device per chip, as JAX has it on hardware.
        options["chip_config_name"] = "megacore"
    if machine.slices > 1:
        options["num_slices"] = machine.slices
    name = f"{kind}:{'x'.join(map(str, shape))}"
    try:
        return in_torus_order(topologies.get_topology_desc(name, platform="tpu", **options).devices)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise InputError(f"--chips: libtpu cannot make a slice '{name}': {_first_line(error)}") from None


def _gpus(machine: Machine) -> Sequence[Any]:
    assert machine.numbers is not None
    kind, (nodes, each) = machine.numbers.kind, machine.shape
    targets = gpu_targets()
    if kind not in targets:
        raise InputError(
            f"--chips: the compiler has no description of {machine.numbers.name}. It has: {', '.join(targets)}."
        )
    for package in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        if installed_version(package):
            break
    else:
        _require("jax-cuda13-plugin", GPU_EXTRA, "compiling for NVIDIA GPUs")
    try:
        return topologies.get_topology_desc(
            platform="cuda", target_config=targets[kind], topology=f"1x{nodes}x{each}"
        ).devices
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise InputError(f"--chips: JAX's CUDA plugin cannot describe this machine: {_first_line(error)}") from None


def gpu_targets() -> Mapping[str, str]:
    """The text of the GpuTargetConfigProto of each kind of GPU."""
    tables = tomllib.loads(GPU_TABLE.read_text(encoding="utf-8"))
    every = tables.pop("every")
    return {kind: _proto(every, table) for kind, table in tables.items()}


def _proto(every: Mapping[str, int], kind: Mapping[str, Any]) -> str:
    major, minor = kind["compute_capability"]
    own = {name: value for name, value in kind.items() if name not in ("compute_capability", "device_description_str")}
    numbers = "\n".join(f"  {name}: {value}" for name, value in {**every, **own}.items())
    return (
        f"gpu_device_info {{\n{numbers}\n  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 10 }\nruntime_version { major: 12 minor: 8 patch: 0 }\n'
        f'device_description_str: "{kind["device_description_str"]}"\n'
    )


def _require(package: str, extra: str, what: str) -> None:
    if not installed_version(package):
        raise InputError(
            f"{what} needs the package '{package}', which is not installed. Install it with: "
            f"pip install 'shardwright[{extra}]'"
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
