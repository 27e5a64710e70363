"""Seconds of products, attention, copies and collectives on the ranks that are there, all at once, for ``shardwright calibrate``.

m, k, n the dims of a product; B rows, L tokens, H heads, D widths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from shardwright.core.plan.attention_kernels import LocalAttention
from shardwright.core.plan.plan import Plan, PlannedCollective
from shardwright.cost.calibration import Measured, Wanted, attention_flops, collective_size
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.io.mesh import Ranks, ranks_of
from shardwright.engine_torch.io.private import all_gather, reduce_scatter
from shardwright.engine_torch.training.processes import alone, connection_of, device_of
from shardwright.training.cluster import Processes

Case = tuple[str, str, float, Callable[[], object]]


def measure(plan: Plan, wanted: Wanted, repeats: int, processes: Processes | None = None) -> Sequence[Measured]:
    """Each ``repeats`` times, after one time that is not counted. All ranks call it; the times are those of the slowest one."""
    processes, connection = connection_of(processes)
    if processes is not None:
        connection.connect(processes)
    try:
        with alone() if processes is None else nullcontext():
            device = device_of(dist.get_rank())
            ranks = ranks_of(plan, device)
            return tuple(
                Measured(what=what, size=size, amount=amount, seconds=_seconds(run, repeats, device))
                for what, size, amount, run in _all(plan, wanted, ranks, device)
            )
    finally:
        if processes is not None:
            connection.disconnect()


def _all(plan: Plan, wanted: Wanted, ranks: Ranks, device: torch.device) -> Iterator[Case]:
    dtype = torch_dtype(wanted.dtype)
    for shape in wanted.products:
        m = max(1, round(shape.m))
        a, b = (
            torch.ones(m, shape.k, dtype=dtype, device=device),
            torch.ones(shape.k, shape.n, dtype=dtype, device=device),
        )
        yield "product", f"{m} x {shape.k} x {shape.n}", 2.0 * m * shape.k * shape.n, partial(torch.mm, a, b)
    if wanted.attention is not None:
        yield from _attention(wanted.attention, dtype, device)
    copied = torch.ones(wanted.copied, device=device)
    yield "copy", f"{4 * wanted.copied} B", 8.0 * wanted.copied, partial(torch.add, copied, 1)
    for one in wanted.collectives:
        run = _collective(one, plan.mesh.size(one.axes), ranks, device)
        if run is not None:
            yield one.kind, collective_size(one), float(one.bytes_per_device), run


def _attention(size: LocalAttention, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    # Values as wide as keys: the products of both widths are counted.
    width = (size.width + size.value_width) // 2
    flops = attention_flops(size)
    q, k = (
        torch.ones(size.rows, size.heads, tokens, width, dtype=dtype, device=device, requires_grad=True)
        for tokens in (size.queries, size.keys)
    )

    def both() -> None:
        F.scaled_dot_product_attention(q, k, k, is_causal=True).sum().backward()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    name = f"{size.rows} x {size.queries} x {size.keys} tokens, {size.heads} heads of {width}"
    yield "attention forward", name, flops, forward
    # A gradient makes the forward pass too: seven products, not five.
    yield "attention backward", name, 3.5 * flops, both


def _collective(one: PlannedCollective, size: int, ranks: Ranks, device: torch.device) -> Callable[[], object] | None:
    group = ranks.peers(one.axes).group
    if group is None:
        return None
    elements = max(size, one.bytes_per_device // 4 // size * size)
    whole, shard = torch.ones(elements, device=device), torch.ones(elements // size, device=device)
    made: dict[str, Callable[[], object]] = {
        "all-gather": partial(all_gather, whole, shard, group),
        "reduce-scatter": partial(reduce_scatter, shard, whole, group),
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
    }
    return made.get(one.kind)


def _seconds(run: Callable[[], object], repeats: int, device: torch.device) -> tuple[float, ...]:
    """Of the slowest rank, each time."""
    run()
    found = []
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started)
    slowest = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return tuple(slowest.tolist())
