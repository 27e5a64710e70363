"""A LayerNormMLP 4,096 wide on 16,384 tokens, forward and backward, on one GPU: under each recipe against bfloat16, and its products
against those of the values of its codes. As it is, in a CUDA graph, and compiled whole from PyTorch 2.13 on.

python -m benchmarks.gpu_modules [--quick]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Literal, NamedTuple
from unittest import mock

import torch

from benchmarks.options import begin
from benchmarks.results import Found, keep
from shardwright.core.recipes.kernels import CPU
from shardwright.engine_torch.io.private import COMPILES_WHOLE
from shardwright.engine_torch.modules import LayerNormMLP, update_scales
from shardwright.engine_torch.modules.parts import precision

AIM = 1.5
RECIPES = (None, "fp8-delayed", "fp8-current", "fp8-row", "fp8-block")
"""Those of which PyTorch multiplies codes, and none."""
BOUND = 2.0**-7
"""Of the norm of an output or gradient: two layers whose results are rounded to bfloat16, and sums of about 13 bits of fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    hidden: int
    inner: int
    tokens: int


FULL = Size(hidden=4096, inner=16384, tokens=16384)
Pass = Callable[[], list[torch.Tensor]]
Way = Literal["as it is", "graphed", "compiled"]


def ways_of(device: str) -> list[Way]:
    """In which a pass can be started here."""
    return ["as it is", *(["graphed"] if device == "cuda" else []), *(["compiled"] if COMPILES_WHOLE else [])]


def pass_of(recipe: str | None, size: Size, device: str, way: Way = "as it is") -> Pass:
    """A forward and a backward pass of a module on tokens in bfloat16: its output, and the gradients of input and parameters."""
    torch.manual_seed(0)
    module = LayerNormMLP(
        size.hidden,
        size.inner,
        bias=False,
        normalization="RMSNorm",
        recipe=recipe,
        params_dtype=torch.bfloat16,
        device=device,
    )
    x = torch.randn(size.tokens, size.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    cotangent = torch.randn_like(x) / size.tokens
    run: Callable[[torch.Tensor], torch.Tensor] = module

    def go() -> list[torch.Tensor]:
        x.grad = None
        module.zero_grad(set_to_none=True)
        y = run(x)
        y.backward(cotangent)
        return [y.detach(), *(one.grad for one in (x, *module.parameters()) if one.grad is not None)]

    if recipe == "fp8-delayed":
        go()
        update_scales(module)
    if way == "graphed":
        run = torch.cuda.make_graphed_callables(module, (x,))  # pyright: ignore[reportAssignmentType]
    if way == "compiled":
        run = torch.compile(module, fullgraph=True)
    return go


@contextmanager
def of_values():
    """In it products multiply the values of codes, as on a device that has no product of these."""
    with mock.patch.object(precision, "product_device", return_value=CPU):
        yield


def apart(go: Pass) -> float:
    """The largest difference of an output or a gradient from that of the values of codes, as a share of its norm."""
    ours = go()
    with of_values():
        theirs = go()
    shares = [
        float((one.float() - other.float()).norm() / other.float().norm())
        for one, other in zip(ours, theirs, strict=True)
    ]
    return max(shares)


def seconds(go: Pass, device: str, times: int) -> tuple[float, float]:
    """Of some passes that are waited for, each, the median; and the mean of as many in a row, as the layers of a model are, where Python
    starts one while the GPU computes another."""
    taken = []
    for number in range(times + 2):
        _wait(device)
        started = time.perf_counter()
        go()
        _wait(device)
        if number >= 2:
            taken.append(time.perf_counter() - started)
    started = time.perf_counter()
    for _ in range(times):
        go()
    _wait(device)
    return median(taken), (time.perf_counter() - started) / times


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Measured(NamedTuple):
    """Of a recipe, the seconds of a pass that is waited for and of one in a row, and as it is how far its products are from those of values."""

    recipe: str
    way: Way
    waited: float
    in_a_row: float
    apart: float | None


def measured(size: Size, device: str, times: int, ways: Sequence[Way]) -> list[Measured]:
    """All recipes in each way, bfloat16 first."""
    found = []
    for way, recipe in product(ways, RECIPES):
        go = pass_of(recipe, size, device, way)
        taken = seconds(go, device, times)
        one = Measured(recipe or "bfloat16", way, *taken, apart(go) if way == "as it is" else None)
        print(f"{one.recipe}, {way}: {1e3 * one.waited:.2f} ms, in a row {1e3 * one.in_a_row:.2f} ms", flush=True)
        found.append(one)
    return found


def times_as_fast(one: Measured, found: Sequence[Measured]) -> tuple[float, float]:
    """As bfloat16 in the same way: waited for, and in a row."""
    plain = next(each for each in found if (each.recipe, each.way) == ("bfloat16", one.way))
    return plain.waited / one.waited, plain.in_a_row / one.in_a_row


def _row(one: Measured, found: Sequence[Measured]) -> list[str]:
    alone, in_a_row = times_as_fast(one, found)
    return [
        one.recipe,
        one.way,
        f"{1e3 * one.waited:.2f}",
        f"{alone:.2f}",
        f"{1e3 * one.in_a_row:.2f}",
        f"{in_a_row:.2f}",
        "" if one.apart is None else f"{one.apart:.1e}",
    ]


def main() -> None:
    """Time all recipes, or say that there is no GPU."""
    options = begin(__doc__, devices=None)
    if not torch.cuda.is_available():
        print("no GPU: PyTorch sees none. Nothing was measured.")
        return
    name = torch.cuda.get_device_name()
    found = measured(FULL, "cuda", 5 if options.quick else 30, ways_of("cuda"))
    alone, in_a_row = (max(times) for times in zip(*(times_as_fast(one, found) for one in found), strict=True))
    beyond = [one.recipe for one in found if one.apart is not None and one.apart > BOUND]
    keep(
        Found(
            name="gpu_modules",
            title=f"LayerNormMLP {FULL.hidden:,} x {FULL.inner:,} on {FULL.tokens:,} tokens, forward and backward",
            columns=[
                "recipe",
                "started",
                "ms",
                "times as fast",
                "ms, in a row",
                "times as fast",
                "from products of values",
            ],
            rows=[_row(one, found) for one in found],
            headline=f"{in_a_row:.2f} times as fast as bfloat16 in a row, {alone:.2f} alone; the aim is {AIM}",
            notes=(
                "Passes are waited for, each; those in a row are not, so that Python starts one while the GPU computes another.",
                f"Products of codes are to be within {BOUND:.1e} of those of values.",
            ),
            numbers=[one._asdict() for one in found],
        ),
        options.load_before,
        accelerator=name,
    )
    if beyond:
        raise SystemExit(f"products of codes beyond {BOUND:.1e} of those of values: {', '.join(beyond)}")


if __name__ == "__main__":
    main()
