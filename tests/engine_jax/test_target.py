"""The requests to compilers for machines that are not present. tests/targets tests whether the compilers support them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.cost import read_machine
from shardwright.engine_jax.compile import target


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The requests to libtpu."""
    found: list[tuple[str, dict[str, Any]]] = []

    def described(name: str, platform: str, **options: Any) -> SimpleNamespace:
        assert platform == "tpu"
        found.append((name, options))
        return SimpleNamespace(devices=[name])

    monkeypatch.setattr(target, "_require", lambda *_: None)
    monkeypatch.setattr(target.topologies, "get_topology_desc", described)
    return found


@pytest.mark.parametrize(
    ("chips", "name", "options"),
    [
        ("v5p:4x4x4", "v5p:4x4x4", {}),
        # A slice that is no multiple of a host's chips is one host.
        ("v5p:2x1x1", "v5p:2x1x1", {"chips_per_host_bounds": (2, 1, 1)}),
        ("v5e:1x1", "v5e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
        ("v5e:2x4*2", "v5e:2x4", {"num_slices": 2}),
        ("v4:2x2x2", "v4:2x2x2", {"chip_config_name": "megacore"}),
    ],
)
def test_the_request_to_libtpu(
    chips: str, name: str, options: dict[str, Any], requests: list[tuple[str, dict[str, Any]]]
) -> None:
    assert target.devices_of(read_machine(chips)) == [name]
    assert requests == [(name, options)]


@pytest.mark.usefixtures("requests")
@pytest.mark.parametrize(("message", "shown"), [("no such slice\nat all", "no such slice"), (" \n", "RuntimeError")])
def test_a_compilers_error_is_reported_by_its_first_line(
    message: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(target.topologies, "get_topology_desc", refuses)
    with pytest.raises(InputError, match=f"libtpu cannot make a slice 'v5p:4x4x4': {shown}$"):
        target.devices_of(read_machine("v5p:4x4x4"))


def test_a_gpu_is_described_by_numbers_and_its_own_text_fields() -> None:
    for text in target.gpu_targets().values():
        inside = text.partition("gpu_device_info {\n")[2].partition("  cuda_compute_capability {")[0]
        assert all(re.fullmatch(r"  \w+: [\d.]+", line) for line in inside.splitlines()), inside
        assert inside.count("core_count") >= 1
