"""Functions that a GPU computes in one pass: the same bits of codes as operation by operation on a CPU, and one operation of a layer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves

from shardwright.core.policies.runs import Run
from shardwright.core.recipes.formula import amax_of, quantize_and_measure
from shardwright.core.recipes.presets import PRESETS, preset
from shardwright.core.recipes.recipe import PER_TENSOR, Operand, Product
from shardwright.engine_torch.io import fused as module
from shardwright.engine_torch.io.fused import fused
from shardwright.engine_torch.io.recomputation import recomputed
from shardwright.engine_torch.layers.gate import gated
from shardwright.engine_torch.layers.norm import rms_norm
from shardwright.engine_torch.precision import arrays
from shardwright.engine_torch.precision.operands import codes_of

NOTHING: frozenset[str] = frozenset()
ALL_AGAIN = Run(
    stack="decoder",
    layers=range(1),
    made=NOTHING,
    named=NOTHING,
    saved=NOTHING,
    hosted=NOTHING,
    again=frozenset({"all"}),
    gathers_again=False,
)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPUs count as GPUs here, and what the compiler has traced is computed as it is: whether all of it can be traced."""
    module.in_one_pass.cache_clear()
    monkeypatch.setattr(module, "is_fused", lambda x: type(x) in (torch.Tensor, torch.nn.Parameter))
    monkeypatch.setattr(arrays, "on_gpu", lambda _: True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    yield
    module.in_one_pass.cache_clear()


def edges(dtype: torch.dtype, *, finite: bool) -> torch.Tensor:
    """[96, 200]: values of many sizes; subnormals, zeros, and where they may be infinite ones and NaN."""
    x = torch.randn(96, 200, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 10, 200)
    x[9], x[13] = 0, 1e-42
    if not finite:
        x[0, 0], x[5, 7], x[50, 150] = float("nan"), float("inf"), -float("inf")
    return x.to(dtype)


def quantizers_of(recipe: str) -> Iterator[tuple[Product, Operand]]:
    seen = []
    for place, one in preset(recipe).quantizers.items():
        if one not in seen:
            seen.append(one)
            yield place


def forms_of(x: torch.Tensor) -> list[torch.Tensor]:
    """It and its transpose, and those of 192 columns, whose loads are wide."""
    wide = x[:, :192].contiguous()
    return [x, x.T, wide, wide.T]


def assert_same_codes(recipe: str, place: tuple[Product, Operand], forms: Sequence[torch.Tensor], device: str) -> None:
    """On a device and operation by operation on a CPU."""
    quantizer = preset(recipe).quantizers[place]
    for one in forms:
        given = {}
        if quantizer.amax == "delayed":
            given["factor"] = torch.tensor(3.7)
        if quantizer.rounding == "stochastic":
            given["random"] = torch.randint(0, 2**24, one.shape, dtype=torch.int32)
        with pytest.MonkeyPatch.context() as plain:
            plain.setattr(module, "is_fused", lambda _: False)
            plain.setattr(arrays, "on_gpu", lambda x: x.is_cuda)
            expected = [*codes_of(one, quantizer, **given), amax_of(one, quantizer, arrays.ARRAYS)]
        given = {name: each.to(device) for name, each in given.items()}
        one = one.to(device)
        found = [*codes_of(one, quantizer, **given), amax_of(one, quantizer, arrays.ARRAYS)]
        assert_equal_bytes(found, expected, f"{recipe} {place}")
        if quantizer.amax == "delayed":
            codes, amax = quantize_and_measure(one, quantizer, arrays.ARRAYS, **given)
            assert_equal_bytes([*codes, amax], expected, f"{recipe} {place}, measured")
        elif quantizer.block == PER_TENSOR:
            by_amax = codes_of(one, quantizer, found[-1].flatten(), **given)
            assert_equal_bytes(by_amax, expected[:-1], f"{recipe} {place}, with its amax")
        if device == "cuda":
            assert found[0].is_contiguous()


def assert_equal_bytes(
    found: Iterable[torch.Tensor | None], expected: Iterable[torch.Tensor | None], what: str
) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None), what
        if ours is not None and theirs is not None:
            assert torch.equal(bytes_of(ours), bytes_of(theirs)), what


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("recipe", "place"),
    [
        ("fp8-delayed", ("output", "weight")),
        ("fp8-current", ("output", "weight")),
        ("fp8-block", ("output", "weight")),
        ("fp8-block", ("weight_gradient", "output_gradient")),
        ("mxfp8", ("output", "input")),
        ("nvfp4", ("weight_gradient", "output_gradient")),
    ],
)
def test_quantizers_are_traced_whole(recipe: str, place: tuple[Product, Operand]) -> None:
    # One NaN makes the scale of an entire tensor NaN, and so all codes.
    quantizer = preset(recipe).quantizers[place]
    finite = quantizer.of_tensor and quantizer.amax == "current"
    _, transposed, wide, _ = forms_of(edges(torch.float32, finite=finite))
    assert_same_codes(recipe, place, [transposed, wide], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", PRESETS)
def test_a_gpu_s_codes_are_a_cpu_s(recipe: str, dtype: torch.dtype) -> None:
    for finite in (True, False):
        for place in quantizers_of(recipe):
            assert_same_codes(recipe, place, forms_of(edges(dtype, finite=finite)), "cuda")


def layer(x: torch.Tensor) -> torch.Tensor:
    """Two that follow each other, of 64 features."""
    scale = torch.linspace(0.5, 1.5, 64, device=x.device, dtype=x.dtype)
    return gated(rms_norm(x, scale, 1e-5), x).sum(-1)


def assert_recomputed(device: str) -> None:
    """A layer that runs again in its backward pass has the gradient of one that keeps all."""
    found = []
    for run in (lambda x: recomputed(layer, ALL_AGAIN, x), layer):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
        run(x).square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


@pytest.mark.usefixtures("traced")
def test_a_fused_function_is_one_operation_of_a_layer_that_runs_again() -> None:
    assert_recomputed("cpu")


@pytest.mark.gpu
def test_a_gpu_runs_layers_of_fused_functions_again() -> None:
    assert_recomputed("cuda")


@pytest.mark.gpu
def test_a_gpu_s_kernels_have_the_results_of_operations() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    results = []
    for device in ("cpu", "cuda"):
        own = [one.to(device).requires_grad_() for one in (x, torch.linspace(0.5, 1.5, 256), x.flip(0))]
        made = gated(rms_norm(own[0], own[1], 1e-5), own[2])
        results.append([made, *torch.autograd.grad(made.square().sum(), own)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("traced")
def test_a_kernel_serves_all_sizes_that_a_width_divides_and_none_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has wide loads and stores."""
    made: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        made.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    numbers = []
    of_128, of_16, of_none = ((256, 384), (384, 512)), ((32, 48), (144, 80), (128 + 16, 32)), ((7, 9), (130, 13))
    mixed = ((256, 48), (512, 80)), ((256, 7), (384, 9))
    for shape in chain(of_128, of_16, of_none, *mixed, of_128, of_16, of_none):
        assert torch.equal(fused(torch.neg)(torch.ones(shape)), -torch.ones(shape))
        numbers.append(len(made))
    assert numbers == [1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5, *[5] * 7]


@pytest.mark.usefixtures("traced")
def test_gradients_flow_through_nothing_that_is_fused() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not fused(torch.neg)(x).requires_grad


class Found(NamedTuple):
    twice: torch.Tensor
    nothing: None
    largest: tuple[torch.Tensor, torch.Tensor]


def several(x: torch.Tensor, y: torch.Tensor) -> Found:
    return Found(x * 2 + y, None, (x.amax(), y.amax(0)))


def operands(seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 48, generator=drawn), torch.randn(rows, 48, generator=drawn)


@pytest.fixture(scope="module")
def compiled() -> module._Compiled:
    """Of ``several``; with kernels of a CPU."""
    return module._Compiled(several)


def test_arguments_that_were_met_before_go_to_the_program_itself(compiled: module._Compiled) -> None:
    for seed, rows in ((0, 16), (1, 16), (2, 32), (3, 7), (4, 16), (5, 7)):
        x, y = operands(seed, rows)
        assert_equal_bytes(tree_leaves(compiled(x, y)), tree_leaves(several(x, y)), f"{seed}")
    assert len(compiled.seen) == 3
    assert {call.run.__name__ for call in compiled.seen.values()} == {"itself"}
    with pytest.MonkeyPatch.context() as without:
        # What torch.compile returned is not called any more.
        without.setattr(compiled, "made", {})
        x, y = operands(6, 32)
        assert isinstance(compiled(x, y), Found)
        assert_equal_bytes(tree_leaves(compiled(x, y)), tree_leaves(several(x, y)), "again")
        # Of a view elsewhere in memory, and of one that begins between two words.
        x, y = x.repeat(2, 1)[16:48], torch.cat([torch.zeros(1), y.flatten()])[1:].view(32, 48)
        assert_equal_bytes(tree_leaves(compiled(x, y)), tree_leaves(several(x, y)), "elsewhere")


def test_a_program_keeps_no_argument(compiled: module._Compiled) -> None:
    x, y = operands(0, 48)
    compiled(x, y)
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is None


def test_another_dtype_of_autocast_is_another_call(compiled: module._Compiled) -> None:
    x, y = operands(0, 16)
    before = set(compiled.seen)
    with torch.autocast("cpu", torch.bfloat16):
        compiled(x, y)
    (more,) = set(compiled.seen) - before
    assert more[0] == torch.bfloat16


def test_two_programs_or_one_that_makes_less_are_not_called_themselves() -> None:
    x, y = operands(0, 16)
    total, rows = x + y, x.shape[0]

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[0] + inputs[1]]

    one = module._Program(run, [x, y], [total])
    direct = module._itself([one], [x, y], (total, None))
    assert direct is not None
    again, nothing = direct(y, y)
    assert torch.equal(again, 2 * y)
    assert nothing is None
    assert module._itself([one, one], [x, y], total) is None
    assert module._itself([], [x, y], total) is None
    assert module._itself([one], [x, y], (total, x * 2)) is None
    assert module._itself([one], [x, y], (total, rows)) is None
    assert module._itself([module._Program(run, [x, y * 1], [total])], [x, y], total) is None
    # A number that is no size of an argument, and one that is.
    assert module._itself([module._Program(run, [x, y, 17], [total])], [x, y], total) is None
    assert module._itself([module._Program(run, [x, y, 16], [total])], [x, y], total) is not None
