"""A core mesh as a JAX mesh of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from shardwright.core.findings.errors import InputError
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.recipes.kernels import CPU, Device


def count_devices() -> int:
    """The devices that JAX sees. Raises InputError where it can use none."""
    return len(_present())


def _present() -> list[Any]:
    try:
        return jax.devices()
    except RuntimeError as error:
        raise InputError(f"JAX cannot use the devices of JAX_PLATFORMS: {error}") from None


def device_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    """The mesh over JAX's first devices, in JAX's order, on TPUs in that of the torus: device ``d`` has the coordinates that the core gives it.

    Raises InputError when there are fewer devices than the mesh needs, and when one of several processes would have no
    device in it.
    """
    present = _present()
    needed = mesh.num_devices
    if len(present) < needed:
        raise InputError(
            f"the mesh {mesh} needs {needed} devices; JAX sees {len(present)} ({present[0].platform}). "
            f"Give the run {needed} devices (--devices {needed} simulates them on CPU), or smaller axes (--mesh)."
        )
    if jax.process_count() > 1 and len(present) != needed:
        raise InputError(
            f"the mesh {mesh} needs {needed} devices, and the {jax.process_count()} processes have {len(present)}: some "
            f"would have no device in the run. Give a mesh of {len(present)} devices (--mesh), or start fewer processes."
        )
    grid = np.array(in_torus_order(present[:needed])).reshape([axis.size for axis in mesh.axes])
    return jax.sharding.Mesh(grid, mesh.names)


def in_torus_order(devices: Sequence[Any]) -> list[Any]:
    """Devices in the order of their places in a TPU slice, the last dim fastest, so that an axis is along dims of the torus; JAX numbers
    them host by host. Other devices stay in JAX's order."""
    if not all(hasattr(one, "coords") for one in devices):
        return list(devices)
    places = {
        one: (getattr(one, "slice_index", 0) or 0, tuple(one.coords), getattr(one, "core_on_chip", 0))
        for one in devices
    }
    return sorted(devices, key=lambda one: places[one])


def product_device(mesh: jax.sharding.Mesh) -> Device:
    """What multiplies on the devices of a mesh, which may exist or only be compiled for."""
    first = mesh.devices.flat[0]
    if first.platform == "tpu":
        return Device(kind="TPU")
    if first.platform in ("gpu", "cuda") and "." in (capability := str(getattr(first, "compute_capability", ""))):
        major, _, minor = capability.partition(".")
        return Device(kind="GPU", capability=(int(major), int(minor)))
    return CPU
