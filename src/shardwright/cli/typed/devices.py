"""Simulated devices: the flag that must be set before JAX starts."""

from __future__ import annotations

import re
from collections.abc import MutableMapping

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
