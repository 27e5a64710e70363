"""The programs of flax and equinox on the page of users' own programs, under every layout that they may have: the losses of one device."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.conftest import ROOT

LAYOUT = 'sw.load_layout("fsdp-tp"), {"data": 1, "fsdp": 4, "tensor": 2}'
HEAD = """
import jax
import numpy as np
import optax
import shardwright as sw
from shardwright.engine_jax import device_mesh, named_sharding, named_shardings, shapes_of, state_shardings
optimizer = optax.{optimizer}(1e-3)
"""
OTHERS = [
    ("ddp", {"data": 8}, "adamw"),
    ("fsdp", {"fsdp": 8}, "lamb"),
    ("hsdp", {"data": 2, "fsdp": 4}, "adafactor"),
    ("tp", {"tensor": 2}, "lion"),
    ("fsdp-tp", {"data": 2, "fsdp": 2, "tensor": 2}, "novograd"),
    ("cp", {"fsdp": 2, "context": 4}, "sm3"),
]


def programs() -> list[str]:
    """Those of flax and of equinox; the second uses functions of the first."""
    page = (ROOT / "docs" / "own-program.md").read_text(encoding="utf-8")
    section = page.split("## Programs of flax and equinox\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "sizes", "optimizer"), OTHERS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_steps_are_those_of_one_device(layout: str, sizes: dict[str, int], optimizer: str) -> None:
    flax, equinox = programs()
    assert LAYOUT in flax
    flax = re.sub(r"(?m)^assert .*\n", "", flax.replace(LAYOUT, f'sw.load_layout("{layout}"), {sizes}'))
    equinox = re.sub(r"(?m)^assert .*\n", "", equinox)
    # A class of equinox asks for its module.
    names: dict[str, Any] = {"__name__": __name__}
    for program in (HEAD.format(optimizer=optimizer), flax, equinox):
        exec(program, names)
