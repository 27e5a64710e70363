"""Time of pricing one candidate of a search: the first with a layout, the first on each other mesh of it, and those that follow on a mesh, which
differ in microbatches, policies of recomputation, chunks of the loss and dtypes.

python -m benchmarks.candidates [--quick]
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from statistics import mean, median

from benchmarks.options import begin
from benchmarks.results import Found, keep
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import typed_request
from shardwright.core.planning import resolve
from shardwright.core.resolution.mesh_sizes import resolve_mesh
from shardwright.core.resolution.request import Request
from shardwright.cost.advice import priced_request

CASES: Mapping[str, tuple[str, str, PlanOptions]] = {
    "671B, ep, 1,024 H100": (
        "deepseek3-671b",
        "ep",
        PlanOptions(chips="h100:128x8", mesh="expert=64,fsdp=16", batch=8192, length=4096, microbatches=8),
    ),
    "671B, ep-as-cp, 128 v5p": ("deepseek3-671b", "ep-as-cp", PlanOptions(chips="v5p:4x4x8", batch=1024, length=4096)),
    "671B, 16 stages of 128 microbatches, 128 H100": (
        "deepseek3-671b",
        "pp",
        PlanOptions(chips="h100:16x8", mesh="stage=16,fsdp=8", batch=1024, length=4096, microbatches=128),
    ),
    "70B, fsdp-tp, 256 H100": (
        "llama3-70b",
        "fsdp-tp",
        PlanOptions(chips="h100:32x8", mesh="fsdp=32,tensor=8", batch=512, length=8192, microbatches=2),
    ),
    "70B, 4 stages, 256 H100": (
        "llama3-70b",
        "pp",
        PlanOptions(chips="h100:32x8", mesh="stage=4,fsdp=64", batch=512, length=8192, microbatches=4),
    ),
}


def main() -> None:
    """Time the first candidates of each case, and those that follow."""
    options = begin(__doc__, devices=8)
    rows, numbers = [], []
    for name, (model, layout, given) in CASES.items():
        typed = typed_request(model, layout, given)
        machine = typed.machine
        assert machine is not None
        stream = neighbours(typed.request)[: 16 if options.quick else 96]
        first = cpu_ms(partial(priced_request, typed.request, machine))
        on_others = [cpu_ms(partial(priced_request, one, machine)) for one in on_other_meshes(typed.request)]
        priced = [cpu_ms(partial(priced_request, one, machine)) for one in stream]
        resolved = [cpu_ms(partial(resolve, one, collectives=False)) for one in stream]
        rows.append(
            [
                name,
                f"{first:.1f}",
                f"{median(on_others):.1f}",
                f"{mean(priced):.1f}",
                f"{max(priced):.1f}",
                f"{mean(resolved):.1f}",
            ]
        )
        numbers.append(
            {
                "case": name,
                "first_ms": first,
                "on_other_meshes_ms": on_others,
                "priced_ms": priced,
                "resolved_ms": resolved,
            }
        )
    keep(
        Found(
            name="candidates",
            title="Time of pricing one candidate of a search, in ms of one core",
            columns=[
                "candidates",
                "first of all",
                "first on another mesh, median",
                "following, mean",
                "longest",
                "resolved alone, mean",
            ],
            rows=rows,
            headline="; ".join(f"{row[0]} {row[2]} and {row[3]} ms" for row in rows),
            numbers=numbers,
        ),
        options.load_before,
    )


def on_other_meshes(request: Request) -> list[Request]:
    """The request with two axes of its mesh larger or smaller, the stages as they are."""
    sizes = {axis: size for axis, size in resolve_mesh(request)[0].shape.items() if axis != "stage"}
    found = [
        {**request.mesh_sizes, **sizes, larger: sizes[larger] * times, smaller: sizes[smaller] // times}
        for larger, smaller in permutations(sizes, 2)
        for times in (2, 4, 8, 16)
        if sizes[smaller] % times == 0
    ]
    return [replace(request, mesh_sizes=one) for one in found]


def neighbours(request: Request) -> list[Request]:
    """Requests on the same mesh with the same layout, in a drawn order."""
    changes = product(
        (1, 2, 4),
        ("full", "dots", "none", "full,keep=attention.output"),
        (1, 4),
        ("float32", "bfloat16"),
        ("float32", "bfloat16"),
    )
    found = [
        replace(
            request,
            microbatches=times * request.microbatches,
            remat=remat,
            loss_chunks=chunks,
            weights_dtype=at_rest,
            moments_dtype=moments,
        )
        for times, remat, chunks, at_rest, moments in changes
    ]
    random.Random(0).shuffle(found)
    return found


def cpu_ms(call: Callable[[], object]) -> float:
    """CPU milliseconds of a call."""
    started = time.process_time()
    call()
    return (time.process_time() - started) * 1e3


if __name__ == "__main__":
    main()
