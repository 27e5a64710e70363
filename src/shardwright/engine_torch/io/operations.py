"""An operation on tensors as it was recorded: the memory that it read and wrote, and the tensors that it returned, without their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardwright.engine_torch.io.private import storage_key


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shape:
    """A tensor, without its values. ``storage``: the key of its storage; ``position``: among the tensors that an operation was given, of
    the one with the same storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    position: int | None = None

    @classmethod
    def of(cls, x: torch.Tensor, position: int | None = None) -> Shape:
        storage = storage_key(x.untyped_storage())
        return cls(
            storage=storage,
            size=tuple(x.shape),
            stride=x.stride(),
            offset=int(x.storage_offset()),
            dtype=x.dtype,
            device=x.device,
            position=position,
        )

    def of_array(self, array: torch.Tensor) -> torch.Tensor:
        """The tensor, of one that has its storage."""
        same = array.detach() if array.dtype == self.dtype else array.detach().view(self.dtype)
        return same.as_strided(self.size, self.stride, self.offset)

    def without_values(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    """An operation of a layer. ``reads``, ``writes``: storages. ``results``: the leaves of what it returns, tensors as ``Shape``;
    ``structure``: of these. ``always``: it is repeated whether its result is needed or not."""

    name: str
    reads: frozenset[int]
    writes: frozenset[int]
    results: tuple[Any, ...]
    structure: Any = None
    always: bool = False

    @property
    def is_view(self) -> bool:
        """Whether it makes nothing: its results have the storage of what it was given."""
        return not self.writes and all(isinstance(one, Shape) for one in self.results)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A function of tensors as an operation, which writes none of them."""

    function: Callable[..., Any]
    namespace = "joined"

    def __str__(self) -> str:
        return getattr(self.function, "__qualname__", "joined")

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def on_its_own(x: torch.Tensor) -> torch.Tensor:
    """The tensor with memory of its own: a part of a larger one would keep all of it."""
    is_part = x.untyped_storage().nbytes() > x.numel() * x.element_size()
    return x.clone(memory_format=torch.contiguous_format) if is_part else x


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among its arguments that an operation writes. Schemas of collectives do not say: all but a send write their first one."""
    if isinstance(func, Joined):
        return
    if func.namespace == "c10d":
        yield from () if "send" in str(func) else (x for x in tree_leaves(args[0]) if isinstance(x, torch.Tensor))
        return
    for number, one in enumerate(func._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(one.name)
            yield from (x for x in tree_leaves(given) if isinstance(x, torch.Tensor))
