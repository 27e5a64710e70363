"""Seconds of products, attention, copies and collectives on the devices that are there, all at once, for ``shardwright calibrate``.

N devices; m, k, n the dims of a product; B rows, L tokens, H heads, D and E widths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.core.plan.attention_kernels import LocalAttention
from shardwright.core.plan.plan import Plan, PlannedCollective
from shardwright.cost.calibration import Measured, Wanted, attention_flops, collective_size
from shardwright.engine_jax.io.mesh import device_mesh


def measure(plan: Plan, wanted: Wanted, repeats: int) -> Sequence[Measured]:
    """Each ``repeats`` times, after one time that is not counted. Raises InputError where the mesh has more devices than JAX."""
    mesh = device_mesh(plan.mesh)
    every = PartitionSpec(mesh.axis_names)
    return tuple(
        Measured(what=what, size=size, amount=amount, seconds=_seconds(run, repeats))
        for what, size, amount, run in _all(plan, wanted, mesh, NamedSharding(mesh, every))
    )


Case = tuple[str, str, float, Callable[[], object]]


def _all(plan: Plan, wanted: Wanted, mesh: jax.sharding.Mesh, sharded: NamedSharding) -> Iterator[Case]:
    count, dtype = plan.mesh.num_devices, jnp.dtype(wanted.dtype)

    def ones(*shape: int, of: jnp.dtype = dtype) -> jax.Array:
        """One array for each device."""
        return jax.jit(partial(jnp.ones, (count, *shape), of), out_shardings=sharded)()

    product = jax.jit(lambda a, b: jnp.einsum("Nmk,Nkn->Nmn", a, b), out_shardings=sharded)
    for shape in wanted.products:
        m = max(1, round(shape.m))
        a, b = ones(m, shape.k), ones(shape.k, shape.n)
        yield "product", f"{m} x {shape.k} x {shape.n}", 2.0 * m * shape.k * shape.n, partial(product, a, b)
    if wanted.attention is not None:
        yield from _attention(wanted.attention, ones)
    copied, copy = ones(wanted.copied, of=jnp.dtype("float32")), jax.jit(lambda x: x + 1, out_shardings=sharded)
    yield "copy", f"{4 * wanted.copied} B", 8.0 * wanted.copied, partial(copy, copied)
    for one in wanted.collectives:
        run = _collective(one, mesh, plan.mesh.size(one.axes))
        if run is not None:
            yield one.kind, collective_size(one), float(one.bytes_per_device), run


def _attention(size: LocalAttention, ones: Callable[..., jax.Array]) -> Iterator[Case]:
    # Values as wide as keys: the products of both widths are counted.
    width = (size.width + size.value_width) // 2
    flops = attention_flops(size)
    q, k = ones(size.rows, size.queries, size.heads, width), ones(size.rows, size.keys, size.heads, width)

    def attended(q_NBLHD: jax.Array, k_NBLHD: jax.Array) -> jax.Array:
        return jax.vmap(partial(jax.nn.dot_product_attention, is_causal=True))(q_NBLHD, k_NBLHD, k_NBLHD)

    forward = jax.jit(attended)
    both = jax.jit(jax.grad(lambda q, k: attended(q, k).astype(jnp.float32).sum(), argnums=(0, 1)))
    name = f"{size.rows} x {size.queries} x {size.keys} tokens, {size.heads} heads of {width}"
    yield "attention forward", name, flops, partial(forward, q, k)
    # A gradient makes the forward pass too: seven products, not five.
    yield "attention backward", name, 3.5 * flops, partial(both, q, k)


def _collective(one: PlannedCollective, mesh: jax.sharding.Mesh, size: int) -> Callable[[], object] | None:
    axes = one.axes if len(one.axes) != 1 else "".join(one.axes)
    elements = max(size, one.bytes_per_device // 4 // size * size)
    made: dict[str, tuple[int, Callable[[jax.Array], jax.Array]]] = {
        "all-gather": (elements // size, lambda x: jax.lax.all_gather(x, axes, tiled=True)),
        "reduce-scatter": (elements, lambda x: jax.lax.psum_scatter(x, axes, tiled=True)),
        "all-reduce": (elements, lambda x: jax.lax.psum(x, axes)),
        "all-to-all": (elements, lambda x: jax.lax.all_to_all(x, axes, 0, 0, tiled=True)),
        "permute": (elements, lambda x: jax.lax.ppermute(x, axes, [(n, (n + 1) % size) for n in range(size)])),
    }
    if one.kind not in made:
        return None
    local, body = made[one.kind]
    every = PartitionSpec(mesh.axis_names)
    array = jax.device_put(np.ones(local * prod(mesh.devices.shape), np.float32), NamedSharding(mesh, every))
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=every, out_specs=every, check_vma=False))
    return partial(run, array)


def _seconds(run: Callable[[], object], repeats: int) -> tuple[float, ...]:
    jax.block_until_ready(run())
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - started)
    return tuple(found)
