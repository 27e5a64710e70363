"""Simulated devices: what must be said to JAX before it starts."""

from __future__ import annotations

import re
from collections.abc import MutableMapping

SIMULATED_DEVICES = "--xla_force_host_platform_device_count"


def simulate_devices(devices: int | None, environment: MutableMapping[str, str], *, jax_is_loaded: bool) -> None:
    """Have JAX's CPU backend show so many devices: a flag that XLA reads once, when JAX starts.

    Nothing is changed when no number was asked for, when JAX has started, or when JAX_PLATFORMS leaves the CPU out.
    The flag goes behind those in XLA_FLAGS, in place of one with another number.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if devices is None or jax_is_loaded or (platforms and "cpu" not in platforms.split(",")):
        return
    others = re.sub(rf"{SIMULATED_DEVICES}=\S*", "", environment.get("XLA_FLAGS", "")).split()
    environment["XLA_FLAGS"] = " ".join([*others, f"{SIMULATED_DEVICES}={devices}"])
