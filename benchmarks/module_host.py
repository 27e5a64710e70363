"""What Python takes to start the kernels of a module's pass, as it is and compiled whole: the time of a pass in which little is computed.

A GPU waits for it where its kernels are shorter. Here a small LayerNormMLP is on a CPU, which counts as an H100: kernels are called as
there, and products give zeros. As it is, this has no kernels of Triton, whose start takes some microseconds more or less.

python -m benchmarks.module_host [--quick]
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from benchmarks.gpu_modules import RECIPES, Pass, Size, Way, pass_of, ways_of
from benchmarks.options import begin
from benchmarks.results import Found, keep
from shardwright.core.recipes.kernels import Device, KernelName
from shardwright.engine_torch.io import fused
from shardwright.engine_torch.modules.parts import precision
from shardwright.engine_torch.precision import arrays, products
from shardwright.engine_torch.precision.kernels import Narrow

SIZE = Size(hidden=32, inner=48, tokens=80)
PASSES = 5
"""In a row, of which the shortest mean counts: whatever else the machine does makes them longer only."""


@torch.compiler.assume_constant_result
def h100(kind: str) -> Device:
    del kind
    return Device(kind="GPU", capability=(9, 0))


@torch.library.custom_op("benchmarks::zeros", mutates_args=())
def zeros(x: torch.Tensor, y: torch.Tensor, scales_of_x: torch.Tensor, scales_of_y: torch.Tensor) -> torch.Tensor:
    """An operation that no compiler sees into: codes are needed for it, and what makes them is not left out."""
    del scales_of_x, scales_of_y
    return torch.zeros(x.shape[0], y.shape[0], dtype=torch.bfloat16)


@zeros.register_fake
def _(x: torch.Tensor, y: torch.Tensor, scales_of_x: torch.Tensor, scales_of_y: torch.Tensor) -> torch.Tensor:
    del scales_of_x, scales_of_y
    return x.new_empty((x.shape[0], y.shape[0]), dtype=torch.bfloat16)


def product(kernel: KernelName, x: Narrow, y: Narrow) -> torch.Tensor:
    del kernel
    return zeros(x.found.codes.flatten(1), y.found.codes.flatten(1), x.found.scales, y.found.scales)


@contextmanager
def counts_as_h100() -> Iterator[None]:
    """In it CPUs do, and products are not computed."""
    fused.in_one_pass.cache_clear()
    with ExitStack() as stack:
        for where, name, found in (
            (fused, "is_fused", lambda x: type(x) in (torch.Tensor, torch.nn.Parameter)),
            (arrays, "on_gpu", lambda _: True),
            (precision, "product_device", h100),
            (products, "multiplied", product),
        ):
            stack.enter_context(mock.patch.object(where, name, found))
        yield
    fused.in_one_pass.cache_clear()


def seconds(go: Pass, times: int) -> float:
    """The least of the means of some passes."""
    means = []
    for _ in range(times):
        started = time.perf_counter()
        for _ in range(PASSES):
            go()
        means.append((time.perf_counter() - started) / PASSES)
    # The first ones compile.
    return min(means[1:])


def measured(times: int, ways: Sequence[Way], recipes: Sequence[str | None] = RECIPES) -> dict[tuple[str, Way], float]:
    """Of each recipe in each way, the seconds of a pass."""
    with counts_as_h100():
        return {
            (recipe or "bfloat16", way): seconds(pass_of(recipe, SIZE, "cpu", way), times)
            for recipe in recipes
            for way in ways
        }


def main() -> None:
    """Time all recipes."""
    options = begin(__doc__, devices=1)
    torch.set_num_threads(1)
    ways = ways_of("cpu")
    found = measured(20 if options.quick else 300, ways)
    names = [recipe or "bfloat16" for recipe in RECIPES]
    least = min(found[name, ways[0]] / found[name, ways[-1]] for name in names[1:])
    keep(
        Found(
            name="module_host",
            title="What Python takes to start the kernels of a LayerNormMLP, forward and backward",
            columns=["recipe", *(f"{way}, ms" for way in ways), "times as fast"],
            rows=[
                [
                    name,
                    *(f"{1e3 * found[name, way]:.2f}" for way in ways),
                    f"{found[name, ways[0]] / found[name, ways[-1]]:.1f}",
                ]
                for name in names
            ],
            headline=f"compiled whole, Python takes at most {1 / least:.0%} of the time",
            notes=("On one core of a CPU that counts as an H100; products give zeros.",),
            numbers=[{"recipe": name, "way": way, "seconds": taken} for (name, way), taken in found.items()],
        ),
        options.load_before,
    )


if __name__ == "__main__":
    main()
