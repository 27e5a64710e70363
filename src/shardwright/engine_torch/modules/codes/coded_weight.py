"""The tensor type of a weight that rests as codes and scales, on PyTorch's own extension points.

| where | what it is |
|---|---|
| at rest | the local tensor of a parameter: the arrays of each copy that products need, and the main weight, if there is one |
| in use | what ``fully_shard`` gathers: the arrays of the entire dim 0, views of its buffers |

An operation on a weight at rest is one on its main weight: so any optimizer updates it in place, and moments have its dtype. Nothing
else may read it, but for the module that multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.io.private import changes_of, elements_of, is_tracing, untraceable
from shardwright.engine_torch.modules.codes.copies import Arrays, Copy
from shardwright.engine_torch.precision.coded import Coded

TRACED = "A weight in torch.compile"
"""The label of what a compiler has in place of a weight."""
_DATA: Any = torch.Tensor.data
"""What reads it, of which a weight has its own."""
MOST_ARRAYS = 6
"""Of two copies, each with a second scale."""


class Held:
    """What a weight at rest is made of; all tensors that are it at rest share this. ``arrays``: of each copy; none before the first time that it
    is quantized. ``main``: the main weight, float32, or None."""

    def __init__(self, label: str, copies: Sequence[Copy], arrays: Sequence[Arrays], main: torch.Tensor | None) -> None:
        self.label, self.main = label, main
        self.copies: Sequence[Copy] = tuple(copies)
        self.arrays: list[Arrays] = list(arrays)
        self.initial: torch.Tensor | None = None
        self.written = False
        self._seen: tuple[int, int, int] | None = None
        self._placed = False
        self._sums: tuple[int, int] | None = None

    def is_stale(self, weight: torch.Tensor) -> bool:
        """Whether the main weight has changed since it was quantized, and the codes have not: both have where a checkpoint was read.
        ``weight``: what consists of this."""
        if self.main is None or self._seen is None:
            return False
        *main, codes = self._changes(weight)
        changed = main != [*self._seen[:2]] or (self._sums is not None and sums_of(self.main) != self._sums)
        return self.written or (changed and codes == self._seen[2])

    def settle(self, weight: torch.Tensor) -> None:
        """The codes are those of the main weight."""
        self.written = False
        self._placed = isinstance(weight, DTensor)
        self._seen = None if self.main is None else self._changes(weight)
        self._sums = None if self.main is None or self._sums is None else sums_of(self.main)

    def notice_view(self) -> None:
        """A view of the main weight is about to be given away. PyTorch counts no changes of what a DTensor views: from now on its elements are
        summed, which waits for the device."""
        if self._placed and self._sums is None and self.main is not None:
            self._sums = sums_of(self.main)

    def _changes(self, weight: torch.Tensor) -> tuple[int, int, int]:
        assert self.main is not None
        # A view of the weight is one of the main weight's memory, and PyTorch counts what is written to it as a change of the weight.
        elements = elements_of(weight)
        in_views = 0 if elements.is_inference() else changes_of(elements)
        return changes_of(self.main), in_views, changes_of(self.arrays[0][0])

    def values(self, shape: Sequence[int]) -> torch.Tensor:
        """The main weight, or the values of the codes that products of the forward pass multiply."""
        return self.main if self.main is not None else self.copies[0].values(self.arrays[0], shape)


def coded_weight(
    held: Held,
    shape: Sequence[int],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    in_use: bool = False,
) -> CodedWeight:
    """A weight of ``shape`` that consists of this."""
    make = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
    weight: CodedWeight = make(CodedWeight, tuple(shape), dtype=dtype, device=device)
    weight.held, weight.in_use = held, in_use
    return weight


class CodedWeight(torch.Tensor):
    """A weight as codes and scales. ``held``: at rest; ``in_use``: arrays of the entire dim 0 that ``fully_shard`` gathered."""

    held: Held
    in_use: bool

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        held = self.held
        formats = ", ".join(copy.quantizer.dtype for copy in held.copies)
        return f"CodedWeight({tuple(self.shape)}, {formats}, {'with' if held.main is not None else 'no'} main weight)"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """What ``torch.compile`` takes it for. A main weight is no part of it: what is compiled writes to none."""
        nums = [len(of_copy) for of_copy in self.held.arrays]
        names = [f"array_{number}" for number in range(sum(nums))]
        return names, (self.held.copies, nums, self.dtype, self.in_use)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: Any, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> CodedWeight:
        del outer_stride
        copies, nums, dtype, in_use = context
        arrays = iter(inner.values())
        held = Held(TRACED, copies, [list(islice(arrays, num)) for num in nums], None)
        return coded_weight(held, outer_size, held.arrays[0][0].device, dtype=dtype, in_use=in_use)

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As of any tensor."""
        return _DATA.__get__(self)

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        """Other codes and another main weight, or elements, of which codes are made. PyTorch would have replaced neither."""
        if isinstance(data, CodedWeight):
            self.held = data.held
            return
        main = _main_of("data")(self)
        if data.shape != main.shape or data.dtype != main.dtype or data.device != main.device:
            raise InputError(
                f"{self.held.label}: its data would be {tuple(data.shape)} in {data.dtype} on {data.device}, and its main weight is "
                f"{tuple(main.shape)} in {main.dtype} on {main.device}. Give such a tensor."
            )
        arrays = [[array.clone() for array in of_copy] for of_copy in self.held.arrays]
        held = Held(self.held.label, self.held.copies, arrays, data)
        held.settle(self)
        held.written = True
        self.held = held

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of its codes, by which ``fully_shard`` sees that it is another tensor. A compiler has codes as tensors of their own."""
        return super().untyped_storage() if is_tracing() else self.held.arrays[0][0].untyped_storage()

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """What ``fully_shard`` sends, as bytes: gloo knows no codes, and a group of parameters has one dtype."""
        del mesh, outer_size, outer_stride, mp_policy
        # A weight that another module shares is refused where that reads it.
        getattr(module, "quantize_changed_weights", lambda: None)()
        arrays = [list(of_copy) for of_copy in self.held.arrays]
        sent = tuple(as_bytes(arrays[copy][number]) for copy, number in self._sent())
        return sent, (self.shape, arrays)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: Sequence[torch.Tensor],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        shape, arrays = metadata
        # In a mesh of one rank it copies the first array only.
        for (copy, number), gathered in zip(self._sent(), all_gather_outputs, strict=False):
            arrays[copy][number] = gathered.view(arrays[copy][number].dtype)
        rows = arrays[0][0].shape[0] * self.held.copies[0].elements("outputs")
        if out is not None:
            local = elements_of(out)
            assert isinstance(local, CodedWeight)
            local.held.arrays[:] = arrays
            return None
        held = Held(self.held.label, self.held.copies, arrays, None)
        return coded_weight(held, (rows, *shape[1:]), self.device, dtype=param_dtype, in_use=True), ()

    def _sent(self) -> list[tuple[int, int]]:
        held = self.held
        return [
            (number, array)
            for number, copy in enumerate(held.copies)
            for array in range(len(held.arrays[number]))
            if copy.sent(array)
        ]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if func in OPERATIONS:
            return OPERATIONS[func](*args, **(kwargs or {}))
        # In inference mode operations come that consist of others.
        if (
            torch.is_inference_mode_enabled()
            and (result := func.decompose(*args, **(kwargs or {}))) is not NotImplemented
        ):
            return result
        written = _written(func, args, kwargs or {})
        if any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns):
            for weight in tree_leaves((tuple(args), kwargs)):
                if isinstance(weight, CodedWeight):
                    weight.held.notice_view()
        result = func(*tree_map(_main_of(func), tuple(args)), **tree_map(_main_of(func), dict(kwargs or {})))
        for weight in written:
            weight.held.written = True
        return result


def _array(weight: CodedWeight, number: int) -> torch.Tensor:
    return [array for of_copy in weight.held.arrays for array in of_copy][number]


for _number in range(MOST_ARRAYS):
    # Not by ``__getattr__``, which a compiler does not trace.
    setattr(CodedWeight, f"array_{_number}", property(partial(_array, number=_number)))


def coded(weight: torch.Tensor, held: Held) -> Coded:
    """A weight in use as the products of its module multiply it. ``weight``: what has the gradient; ``held``: what it consists of."""
    outputs, inputs = weight.shape
    copies, arrays = held.copies, held.arrays
    return Coded(
        carrier=weight,
        first=copies[0].quantized(arrays[0]),
        second=(lambda: copies[1].quantized(arrays[1])) if len(copies) > 1 else None,
        quantizers=(copies[0].quantizer, copies[-1].quantizer),
        sizes=(outputs, inputs),
    )


def sums_of(matrix: torch.Tensor) -> tuple[int, int]:
    """Of the bits of a float32 matrix, weighted by the number of the row, and of the column: changed elements have others."""
    bits = matrix.detach().view(torch.int32)
    sums = [bits.sum(dim, dtype=torch.int64) for dim in (1, 0)]
    by_rows, by_columns = ((num * torch.arange(1, len(num) + 1, device=num.device)).sum() for num in sums)
    return int(by_rows), int(by_columns)


def as_bytes(array: torch.Tensor) -> torch.Tensor:
    """A contiguous array's memory; a single number in one row."""
    return (array if array.dim() else array.view(1)).view(torch.uint8)


def _main_of(func: Any) -> Callable[[Any], Any]:
    def main_of(value: Any) -> Any:
        if not isinstance(value, CodedWeight):
            return value
        if value.held.label == TRACED:
            raise untraceable(func)
        if value.held.main is None or value.in_use:
            raise InputError(
                f"{value.held.label} rests as codes, and only its module may read it: {func} needs elements. set_device_mesh and fully_shard "
                f"come before reset_parameters; an optimizer needs keep_main_weights(module, optimizer) first; a weight that another module "
                f"shares, as a tied embedding, needs primary_weights=None."
            )
        return value.held.main.view(value.shape)

    return main_of


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[CodedWeight]:
    """The weights that an operation changes in place."""
    named = {argument.name: kwargs.get(argument.name) for argument in func._schema.arguments}
    named |= {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    changed = [
        named[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [weight for weight in tree_leaves(changed) if isinstance(weight, CodedWeight)]


def _again(weight: CodedWeight, shape: Sequence[int] | None = None) -> CodedWeight:
    shape = weight.shape if shape is None else shape
    return coded_weight(weight.held, shape, weight.device, dtype=weight.dtype, in_use=weight.in_use)


def _seen_as(weight: CodedWeight, shape: Sequence[int]) -> torch.Tensor:
    # In one row `fully_shard` keeps what it gathers of other tensors. Of this one it never reads that.
    shape = (weight.numel(),) if tuple(shape) == (-1,) else tuple(shape)
    if shape in ((weight.numel(),), tuple(weight.shape)):
        return _again(weight, shape)
    weight.held.notice_view()
    return _main_of(_ATEN.view.default)(weight).view(shape)


def _strided(
    weight: CodedWeight, shape: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> torch.Tensor:
    # `fully_shard` asks for what it has gathered as it is.
    if tuple(shape) == tuple(weight.shape) and tuple(stride) == weight.stride() and not offset:
        return _again(weight)
    weight.held.notice_view()
    return _main_of(_ATEN.as_strided.default)(weight).as_strided(shape, stride, offset)


def _like(func: Any, weight: CodedWeight, *values: Any, **options: Any) -> torch.Tensor:
    """A tensor of its sizes needs none of its elements."""
    if weight.held.label == TRACED:
        raise untraceable(func)
    options["device"] = options.get("device") or weight.device
    return func(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), *values, **options)


def _moved(weight: CodedWeight, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> CodedWeight:
    if dtype not in (None, weight.dtype):
        raise InputError(
            f"{weight.held.label} rests as codes, and its main weight is {weight.dtype}: it cannot become {dtype}. For a narrower "
            f"computation give fully_shard a MixedPrecisionPolicy, or use torch.autocast."
        )
    del options

    def moved(array: torch.Tensor) -> torch.Tensor:
        return array.clone() if device is None else array.to(device, copy=True)

    held = weight.held
    arrays = [[moved(array) for array in of_copy] for of_copy in held.arrays]
    copied = Held(held.label, held.copies, arrays, None if held.main is None else moved(held.main))
    moved_weight = coded_weight(copied, weight.shape, arrays[0][0].device, dtype=weight.dtype, in_use=weight.in_use)
    copied.settle(moved_weight)
    copied.written = held.is_stale(weight)
    return moved_weight


def _copied(weight: CodedWeight, **_: object) -> CodedWeight:
    return _moved(weight)


_ATEN = torch.ops.aten
OPERATIONS: Mapping[Any, Callable[..., Any]] = {
    _ATEN.detach.default: _again,
    _ATEN.alias.default: _again,
    _ATEN.view.default: _seen_as,
    _ATEN.as_strided.default: _strided,
    _ATEN.clone.default: _copied,
    _ATEN._to_copy.default: _moved,
    **{
        func: partial(_like, func)
        for func in (
            _ATEN.empty_like.default,
            _ATEN.full_like.default,
            _ATEN.ones_like.default,
            _ATEN.zeros_like.default,
            _ATEN.new_empty.default,
            _ATEN.new_zeros.default,
        )
    },
}
"""Those that keep it a weight of codes, or need none of its elements; every other one is of its main weight."""
