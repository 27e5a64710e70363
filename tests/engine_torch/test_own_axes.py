"""The axes that a loader and a loss ask the mesh of a user's own module for, against groups that are counted by hand."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import product
from random import Random
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from shardwright.engine_torch.own_program.module import parallelize
from tests.engine_torch.own_block import CPU, plan_of
from tests.engine_torch.test_own_module import rank

TENSOR = {"elsewhere": "tensor", "sequence_parallel": True}
ROLES: Mapping[str, Any] = {"data": "data", "fsdp": "fsdp", "context": "context", "tensor": TENSOR}
OF_NAMES = {
    "dp": ("data", "fsdp"),
    "batch": ("data", "fsdp"),
    "loss": ("data", "fsdp", "context"),
    "dp_shard_cp": ("fsdp", "context"),
}
NAMES = {"0.weight": "mlp: mlp embed", "1.weight": "mlp: embed mlp"}


def module_of() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))


def ranks_along(sizes: Mapping[str, int], axes: tuple[str, ...], number: int) -> list[int]:
    """The ranks whose coordinates differ from those of a rank along these axes only."""
    coordinates = list(product(*(range(size) for size in sizes.values())))
    here = coordinates[number]
    return [
        other
        for other, there in enumerate(coordinates)
        if all(axis in axes or a == b for axis, a, b in zip(sizes, here, there, strict=True))
    ]


@pytest.mark.parametrize("seed", range(12))
def test_names_of_other_programs_are_on_the_mesh(seed: int) -> None:
    random = Random(seed)
    kinds = sorted(random.sample(list(ROLES), random.randint(1, 4)), key=list(ROLES).index)
    kind_of = dict(zip(random.sample(["a", "b", "dp_shard", "cp", "tp", "x_y"], len(kinds)), kinds, strict=True))
    sizes = {axis: random.choice([1, 2]) for axis in kind_of}
    plan = plan_of({axis: ROLES[kind] for axis, kind in kind_of.items()}, sizes, module_of(), NAMES)
    number = random.randrange(plan.mesh.num_devices)
    with rank(number, plan.mesh.num_devices):
        mesh = parallelize(module_of(), plan, device=CPU)
        assert mesh.mesh_dim_names == tuple(sizes)
        for name, needed_kinds in OF_NAMES.items():
            needed = ranks_along(sizes, tuple(axis for axis, kind in kind_of.items() if kind in needed_kinds), number)
            assert dist.get_process_group_ranks(mesh.get_group(name)) == needed, (name, sizes, kind_of)
            assert mesh.get_local_rank(name) == needed.index(number)
            with warnings.catch_warnings():
                # PyTorch's own, of a name that was flattened.
                warnings.simplefilter("ignore")
                assert (mesh[name].mesh.tolist(), mesh[name].mesh_dim_names) == (needed, (name,))


def test_an_axis_of_the_plan_keeps_its_name() -> None:
    same = plan_of({"dp": "fsdp"}, {"dp": 4}, module_of(), NAMES)
    with rank(1, 4):
        mesh = parallelize(module_of(), same, device=CPU)
        assert dist.get_process_group_ranks(mesh.get_group("dp")) == [0, 1, 2, 3]
    other = plan_of({"dp": "data", "fsdp": "fsdp"}, {"dp": 2, "fsdp": 2}, module_of(), NAMES)
    with rank(1, 4):
        with pytest.warns(UserWarning, match="the plan's axis") as warned:
            mesh = parallelize(module_of(), other, device=CPU)
        assert dist.get_process_group_ranks(mesh.get_group("dp")) == [1, 3]
        assert dist.get_process_group_ranks(mesh.get_group("batch")) == [0, 1, 2, 3]
    assert [str(warning.message) for warning in warned] == [
        "the plan's axis 'dp' has 2 ranks, and under that name other programs expect 4 (dp and fsdp). mesh['dp'] is the plan's axis: give "
        "it another name in the layout, if a loader or a loss asks for 'dp'."
    ]
