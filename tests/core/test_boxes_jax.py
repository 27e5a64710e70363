"""Boxes against the indices that JAX's own ``NamedSharding`` gives each of 8 simulated devices."""

from random import Random

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import owned_boxes
from shardwright.core.mesh.mesh import Axis, Mesh
from shardwright.core.mesh.spec import DimSpec, Spec

MESH_SIZES = [(4,), (8,), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (1, 8), (2, 2, 2), (2, 1, 3), (2, 1, 2, 2)]  # fmt: skip
NUM_CASES = 2500


def random_case(random: Random) -> tuple[Spec, Mesh, tuple[int, ...]]:
    """Any order of the axes over 1 to 4 dims; the axes divide every dim, as JAX requires."""
    sizes = random.choice(MESH_SIZES)
    mesh = Mesh(tuple(Axis(name=name, size=size) for name, size in zip("abcd", sizes, strict=False)))
    dims: list[list[str]] = [[] for _ in range(random.randint(1, 4))]
    for axis in random.sample(mesh.names, len(mesh.names)):
        if random.random() < 0.85:
            random.choice(dims).append(axis)
    shape = tuple(mesh.size(axes) * random.randint(1, 5) for axes in dims)
    return Spec(tuple(DimSpec(f"dim{n}", tuple(axes)) for n, axes in enumerate(dims))), mesh, shape


def boxes_of_jax(spec: Spec, mesh: Mesh, shape: tuple[int, ...]) -> dict[int, Box]:
    """The box of each device according to JAX, by its number in the mesh."""
    devices = np.array(jax.devices()[: mesh.num_devices])
    jax_mesh = jax.sharding.Mesh(devices.reshape([axis.size for axis in mesh.axes]), mesh.names)
    sharding = NamedSharding(jax_mesh, PartitionSpec(*(dim.axes or None for dim in spec.dims)))
    number = {device: n for n, device in enumerate(devices)}
    found = {}
    for device, slices in sharding.devices_indices_map(shape).items():
        ranges = [one.indices(size)[:2] for one, size in zip(slices, shape, strict=True)]
        found[number[device]] = Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))
    return found


def test_boxes_of_random_specs_are_those_of_jax() -> None:
    assert len(jax.devices()) == 8
    random = Random(0)
    strided = 0
    for _ in range(NUM_CASES):
        spec, mesh, shape = random_case(random)
        expected = boxes_of_jax(spec, mesh, shape)
        found = owned_boxes(spec, mesh, shape)
        assert {n: boxes[0] for n, boxes in enumerate(found)} == expected, (str(spec), str(mesh), shape)
        strided += any(dim.axes != mesh.in_mesh_order(dim.axes) for dim in spec.dims)
    assert strided > 200
