"""What the devices of a mesh quantize in a step, put together and compared with quantizing it at once, as one device does.

A run on another layout sums in another order, so its elements differ in their last bits from those of one device. What a
recipe makes of the same elements is compared here: each device's elements are put together to the entire operand, which is then
quantized at once. Where the plan says that an operand is free of the layout, all codes and scales must be equal.

The model has one layer, nothing is recomputed and there is one microbatch, so every operand is quantized once in a step. Every
token is valid and is assigned to all experts, so that the rows of each expert are known.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from math import lcm
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.plan.plan import Plan
from shardwright.core.quantization.quantized import QuantizedOperand
from shardwright.core.recipes import formula
from shardwright.core.recipes.arrays import Arrays
from shardwright.core.recipes.formats import E2M1
from shardwright.core.recipes.hadamard import padded_to
from shardwright.core.recipes.recipe import Operand, Product, Quantizer
from shardwright.core.resolution.resolve import expert_axes
from tests.core.quantized_by_hand import merged

TWO_ONES = 0x22
"""Two codes of E2M1 for 1, in a byte."""


class Place(NamedTuple):
    """An operand of a product of a weight."""

    weight: str
    product: Product
    operand: Operand


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked(Quantizer):
    """A quantizer that knows whose it is."""

    place: Place


def marked(plan: Plan) -> Plan:
    """The plan with marked quantizers: its engine quantizes by them, and what it quantizes can be told apart."""

    def mark(weight: str, one: QuantizedOperand) -> QuantizedOperand:
        given = {field.name: getattr(one.quantizer, field.name) for field in fields(one.quantizer)}
        return replace(one, quantizer=Marked(**given, place=Place(weight, one.product, one.operand)))

    return replace(
        plan,
        quantized=tuple(
            replace(weight, operands=tuple(mark(weight.name, one) for one in weight.operands))
            for weight in plan.quantized
        ),
    )


class Piece(NamedTuple):
    """What a device quantized at a place: its elements, the values of their codes, the scale of each element, and the random number by
    which it was rounded, or 0; by the two dims
    of the operand, in the order of ``DIMS``. Of experts there is one for each, or one with all rows, sorted by expert."""

    elements: np.ndarray
    values: np.ndarray
    scales: np.ndarray
    random: np.ndarray


Record = Callable[[Place, int, Any, Any, Any, Any], None]
"""``record(place, contracted_dims, elements, values, scales, random)``: arrays of an engine; scales and random numbers by element."""


@contextmanager
def recording(on: Arrays, record: Record) -> Iterator[None]:
    """A context in which each call of the core's formula with a marked quantizer is recorded, whatever module calls it."""

    def recorded(right: Callable[..., Any]) -> Callable[..., Any]:
        def quantize(x: Any, quantizer: Quantizer, arrays: Arrays, *, contracted_dims: int = 1, **options: Any) -> Any:
            made = right(x, quantizer, arrays, contracted_dims=contracted_dims, **options)
            if isinstance(quantizer, Marked):
                codes = made if isinstance(made, formula.Quantized) else made[0]
                ones, factor = on.float32(x) * 0 + 1, options.get("factor")
                values, scales = values_of(codes, ones, quantizer, on, contracted_dims, factor)
                random = options.get("random")
                drawn = ones * 0 if random is None else on.float32(random)
                record(quantizer.place, contracted_dims, on.float32(x), values, scales, drawn)
            return made

        return quantize

    with ExitStack() as patches:
        for right in (formula.quantize, formula.quantize_and_measure):
            own = recorded(right)
            for name, module in list(sys.modules.items()):
                if name.startswith("shardwright.") and getattr(module, right.__name__, None) is right:
                    patches.enter_context(mock.patch.object(module, right.__name__, own))
        yield


def values_of(
    made: formula.Quantized, ones: Any, quantizer: Quantizer, on: Arrays, contracted_dims: int, factor: Any = None
) -> tuple[Any, Any]:
    """The values of codes, and for each element its scale: the value of a code of 1. Of a delayed amax it is the factor."""
    values = formula.dequantize(made, ones.shape, quantizer, on, contracted_dims=contracted_dims)
    codes = made.codes * 0 + TWO_ONES if quantizer.dtype == E2M1 else on.cast(ones, quantizer.dtype)
    scales = made.scales if factor is None else on.reshape(factor, made.scales.shape)
    of_one = made._replace(codes=codes, scales=scales)
    return values, formula.dequantize(of_one, ones.shape, quantizer, on, contracted_dims=contracted_dims)


def matrices(place: Place, array: np.ndarray, contracted_dims: int) -> list[np.ndarray]:
    """An array as it is quantized, by the two dims of the operand: one matrix, or one of each expert."""
    if array.ndim == 3 and contracted_dims == 1:
        if place.operand == "weight":
            return [_by_dims(place, one) for one in array]
        # Rows of experts, or groups of them that are contracted, each an operand of its own.
        return [array[:, 0] if array.shape[1] == 1 else array.swapaxes(1, 2).reshape(-1, array.shape[1])]
    return [_by_dims(place, array.reshape(array.shape[0], -1))]


def _by_dims(place: Place, matrix: np.ndarray) -> np.ndarray:
    """The contracted dim is last where it is quantized."""
    turned = place.product == "weight_gradient" or (place.operand == "weight" and place.product == "output")
    return matrix.T if turned else matrix


Recorded = Sequence[Mapping[Place, Sequence[Piece]]]
"""By device and place: the pieces in the order in which they were quantized."""


def moved(plan: Plan, recorded: Recorded) -> dict[Place, float]:
    """Of each operand the share of elements whose code or scale is not that of one device that has them all.

    Asserts that replicas have the same codes and scales of what is free.
    """
    found: dict[Place, float] = {}
    for weight in plan.quantized:
        for operand in weight.operands:
            place = Place(weight.name, operand.product, operand.operand)
            pieces = [one[place] for one in recorded]
            entire = _of_experts(plan, operand, pieces) if "experts" in _axes(plan, place) else None
            found[place] = _share(plan, place, operand, entire or [_assembled(plan, operand, pieces)])
    return found


def _axes(plan: Plan, place: Place) -> tuple[str, ...]:
    return plan.request.table.weight(place.weight).logical_axes


def _assembled(plan: Plan, operand: QuantizedOperand, pieces: Sequence[Sequence[Piece]]) -> Piece:
    first, second = operand.dims.values()
    entire = _Entire(operand, (first.size if operand.operand == "weight" else _tokens(plan), second.size))
    for device, (piece,) in enumerate(pieces):
        columns = merged(second.sizes, second.sharding, plan.mesh, device)
        if operand.operand == "weight":
            rows = merged(first.sizes, first.sharding, plan.mesh, device)
        else:
            rows = _own_tokens(plan, first.sharding, device)
        entire.put(rows, columns, piece)
    return entire.piece


def _of_experts(plan: Plan, operand: QuantizedOperand, pieces: Sequence[Sequence[Piece]]) -> list[Piece]:
    """The operand of each expert."""
    first, second = operand.dims.values()
    weight = plan.by_name[next(w.name for w in plan.quantized if operand in w.operands)]
    sharding = plan.mesh.larger_than_one(weight.in_use.axes_of("experts"))
    num = plan.request.table.sizes["experts"]
    size = first.size if operand.operand == "weight" else _tokens(plan)
    entire = [_Entire(operand, (size, second.size)) for _ in range(num)]
    for device, of_device in enumerate(pieces):
        experts = merged((num,), (sharding,), plan.mesh, device)
        assert len(experts) == operand.experts, operand
        columns = merged(second.sizes, second.sharding, plan.mesh, device)
        if operand.operand == "weight":
            rows = merged(first.sizes, first.sharding, plan.mesh, device)
        else:
            rows = _dispatched_tokens(plan, device)
        own = of_device if len(of_device) == len(experts) else _by_expert(operand, of_device, len(experts), len(rows))
        for expert, piece in zip(experts, own, strict=True):
            entire[expert].put(rows, columns, piece)
    return [one.piece for one in entire]


def _by_expert(operand: QuantizedOperand, pieces: Sequence[Piece], experts: int, rows: int) -> list[Piece]:
    """Rows of a buffer that are sorted by expert; those after the last expert's are of none. Where they are contracted, each expert's
    begin with a block, and with a group of a transform."""
    (piece,), step, quantizer = pieces, rows, operand.quantizer
    if operand.product == "weight_gradient":
        step = padded_to(rows, lcm(quantizer.hadamard or 1, quantizer.block.contracted or 1))
    return [Piece(*(array[number * step : number * step + rows] for array in piece)) for number in range(experts)]


class _Entire:
    """An operand that is put together. What several devices have must be the same."""

    def __init__(self, operand: QuantizedOperand, shape: tuple[int, int]) -> None:
        self._operand = operand
        self.piece = Piece(*(np.full(shape, np.nan, np.float32) for _ in Piece._fields))

    def put(self, rows: np.ndarray, columns: np.ndarray, piece: Piece) -> None:
        place = np.ix_(rows, columns)
        for name, array, part in zip(Piece._fields, self.piece, piece, strict=True):
            known = array[place]
            if self._operand.freedom.free and not np.isnan(known).all():
                np.testing.assert_array_equal(known, part, err_msg=f"replicas of {self._operand}: {name}")
            array[place] = part


def _share(plan: Plan, place: Place, operand: QuantizedOperand, entire: Sequence[Piece]) -> float:
    differ = total = 0
    for piece in entire:
        assert not any(np.isnan(array).any() for array in piece), operand
        values, scales = _at_once(plan, place, operand.quantizer, piece)
        differ += int(((values != piece.values) | (_normal(scales) != _normal(piece.scales))).sum())
        total += values.size
    return differ / total


def _normal(scales: np.ndarray) -> np.ndarray:
    """Scales of blocks of zeros are the least of E8M0, 2^-127, which XLA on CPU gives as 0 in float32. Their bytes are compared where
    quantizers are."""
    return np.where(np.abs(scales) < np.finfo(np.float32).tiny, 0, scales)


def _at_once(plan: Plan, place: Place, quantizer: Quantizer, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
    """The values and scales of an entire operand on one device. With a delayed amax its factor is that of the first element."""
    import torch

    from shardwright.engine_torch.precision.arrays import ARRAYS

    array, contracted_dims = _by_dims(place, piece.elements), 1
    factor = torch.from_numpy(piece.scales[:1, 0].copy()) if quantizer.amax == "delayed" else None
    if place.product == "weight_gradient" and "experts" not in _axes(plan, place):
        # Blocks of tokens begin with each row.
        array, contracted_dims = array.reshape(array.shape[0], plan.request.batch, plan.request.length), 2
    x, random = torch.from_numpy(np.ascontiguousarray(array)), None
    if quantizer.rounding == "stochastic":
        drawn = np.ascontiguousarray(_by_dims(place, piece.random)).reshape(array.shape)
        random = torch.from_numpy(drawn.astype(np.int32))
    made = formula.quantize(x, quantizer, ARRAYS, contracted_dims=contracted_dims, factor=factor, random=random)
    found = values_of(made, torch.ones_like(x), quantizer, ARRAYS, contracted_dims, factor)
    values, scales = (matrices(place, one.numpy(), contracted_dims)[0] for one in found)
    return values, scales


def _tokens(plan: Plan) -> int:
    return plan.request.batch * plan.request.length


def _own_tokens(plan: Plan, sharding: Sequence[tuple[str, ...]], device: int) -> np.ndarray:
    """The numbers in the text of a device's tokens, row by row."""
    batch, length = plan.request.batch, plan.request.length
    rows, places = (
        merged((size,), (axes,), plan.mesh, device) for size, axes in zip((batch, length), sharding, strict=True)
    )
    chunks = np.array(plan.row_chunks)
    text = (chunks[:, None] * (length // len(chunks)) + np.arange(length // len(chunks))).ravel()
    return (rows[:, None] * length + text[places]).ravel()


def _dispatched_tokens(plan: Plan, device: int) -> np.ndarray:
    """The tokens of each of a device's experts, in the order of the devices that sent them."""
    spec: Spec = plan.by_name["router.grouped"].in_use
    sharding = tuple(plan.mesh.larger_than_one(spec.axes_of(name)) for name in ("batch", "groups"))
    axes = expert_axes(plan.request.layout, plan.mesh)
    return np.concatenate([_own_tokens(plan, sharding, source) for source in _in_order(plan.mesh, device, axes)])


def _in_order(mesh: Mesh, device: int, axes: Sequence[str]) -> list[int]:
    """The devices along axes, major first as given."""
    members = mesh.group(device, axes)
    return sorted(members, key=lambda one: [mesh.coordinates(one)[axis] for axis in axes])


def valid_rows(rows: int, length: int, vocab: int, step: int) -> Mapping[str, np.ndarray]:
    """Rows of one document each, without padding."""
    numbers = np.random.default_rng([step, rows, length])
    words = numbers.integers(0, vocab, (rows, length + 1), dtype=np.int32)
    ones = np.ones((rows, length), np.int32)
    return {
        "tokens": words[:, :-1].copy(),
        "targets": words[:, 1:].copy(),
        "positions": np.arange(length, dtype=np.int32) * ones,
        "segments": ones,
        "valid": ones.astype(np.bool_),
    }
