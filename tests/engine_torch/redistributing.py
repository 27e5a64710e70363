"""What ranks run in the tests of ``redistribute``: they reshard arrays of integers between specs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations

import torch

from shardwright.core.boxes.boxes import shard_box
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.plan.movement import ReshardStep, reshard_steps
from shardwright.engine_torch.io.mesh import Peers, Ranks
from shardwright.engine_torch.io.redistribute import exchanged, gathered, own_shard, redistribute, scattered, summed

MESH = Mesh.of(a=2, b=2)
NAMES = ("x", "y", "z")
SHAPE = (8, 16, 8)


def any_spec(rng: random.Random, mesh: Mesh) -> Spec:
    """Each axis shards one dim or none, in any order of major and minor."""
    axes: dict[str, list[str]] = {name: [] for name in NAMES}
    for axis in rng.sample(mesh.names, k=len(mesh.names)):
        if name := rng.choice((*NAMES, None)):
            axes[name].append(axis)
    return Spec.build(NAMES, axes)


def any_resharding(seed: int, mesh: Mesh) -> tuple[Spec, Spec, tuple[str, ...], tuple[ReshardStep, ...]]:
    """Two specs, the axes over which the array of the first one is partial, and the steps from the first to the second."""
    rng = random.Random(seed)
    before, after = any_spec(rng, mesh), any_spec(rng, mesh)
    axes = tuple(axis for axis in mesh.names if axis not in before.axes and rng.random() < 0.5)
    return before, after, axes, reshard_steps(before, after, axes, mesh)


def ranks_on(mesh: Mesh) -> Ranks:
    names = mesh.names
    return Ranks(
        mesh, [axes for num in range(1, len(names) + 1) for axes in permutations(names, num)], torch.device("cpu")
    )


def wrong_after_steps(mesh: Mesh, seeds: Sequence[int], dtype: torch.dtype) -> list[str]:
    """The reshardings of these seeds after which this rank does not have its shard of the full array."""
    ranks = ranks_on(mesh)
    return [f"seed {seed}: {found}" for seed in seeds if (found := _wrong(ranks, seed, dtype))]


def _wrong(ranks: Ranks, seed: int, dtype: torch.dtype) -> str:
    before, after, axes, resharding = any_resharding(seed, ranks.mesh)
    full = torch.arange(8 * 16 * 8).view(SHAPE).to(dtype)
    # The summands differ: equal ones would hide a missing rank.
    peers = ranks.peers(axes)
    factor, total = peers.index + 1, sum(range(1, peers.size + 1))
    moved = redistribute(_shard(full, before, ranks) * factor, resharding, NAMES, ranks)
    return "" if torch.equal(moved, _shard(full, after, ranks) * total) else f"{before} -> {after}: {resharding}"


def _shard(full: torch.Tensor, spec: Spec, ranks: Ranks) -> torch.Tensor:
    box = shard_box(spec, ranks.mesh, SHAPE, ranks.rank)
    assert box is not None
    return full[box.slices]


def each_collective(mesh: Mesh, axes: tuple[str, ...]) -> dict[str, list]:
    """The result of every collective over ``axes``, all those of the mesh, on this rank. Before, shard i of n has the numbers
    100 i + 0 to 100 i + 2 n - 1, in one row."""
    peers = ranks_on(mesh).peers(axes)
    own = torch.arange(2.0 * peers.size)[None] + 100 * peers.index
    return {
        "index": [peers.index],
        "summed": summed(own, peers).tolist(),
        "gathered": gathered(own, 0, peers).tolist(),
        "gathered along 1": gathered(own[:, :1], 1, peers).tolist(),
        "gathered bits": gathered(own[:, :1] > 100, 0, peers).tolist(),
        "scattered": scattered(own, 1, peers).tolist(),
        "exchanged": exchanged(own, 0, 1, peers).tolist(),
        "own shard": own_shard(own, 1, peers).tolist(),
    }


def by_hand(index: int, num: int) -> dict[str, list]:
    """The same for shard ``index`` of ``num``."""
    rows = [[100.0 * shard + place for place in range(2 * num)] for shard in range(num)]
    total = [sum(column) for column in zip(*rows, strict=True)]
    mine = slice(2 * index, 2 * index + 2)
    return {
        "index": [index],
        "summed": [total],
        "gathered": rows,
        "gathered along 1": [[row[0] for row in rows]],
        "gathered bits": [[row[0] > 100] for row in rows],
        "scattered": [total[mine]],
        "exchanged": [row[mine] for row in rows],
        "own shard": [rows[index][mine]],
    }


def leaves_its_input_alone(axes: tuple[str, ...]) -> bool:
    peers: Peers = ranks_on(MESH).peers(axes)
    own = torch.arange(8.0)[None]
    before = own.clone()
    for collective in (summed(own, peers), gathered(own, 1, peers), scattered(own, 1, peers)):
        collective.add_(1)
    return torch.equal(own, before)
