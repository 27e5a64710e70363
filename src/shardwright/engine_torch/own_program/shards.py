"""The boxes that a rank holds of a tensor, sharded or not, and their elements as a checkpoint has them.

What a DTensor's placements say of an uneven dim may not be what the rank holds (``core/boxes/held.py``), so its local shape is
compared with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from shardwright.checkpoint import CheckpointError, TensorInfo
from shardwright.checkpoint.writing.data_file import Lasts
from shardwright.core.boxes.box import Box
from shardwright.core.boxes.held import Fit, LocalBox, Reading, agreed, fit
from shardwright.core.boxes.placements import Placement, Replicate, Shard, StridedShard
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.patterns import names_of
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.io.host import bits_of, copied_bits, now_on
from shardwright.engine_torch.io.private import changes_of
from shardwright.runs import Reads
from shardwright.runs.own_program.held import HeldShard, HeldTensor
from shardwright.runs.own_program.members import Members

PLAIN = getattr(torch.Tensor, "__torch_dispatch__")  # noqa: B009
"""What every tensor has whose elements are its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """A tensor of the program as this rank holds it. ``local``: its elements here; ``fit``: what its placements can mean.

    ``fit`` is None for a rank that is not in the tensor's mesh. ``changes``: counts changes in place: of a DTensor, PyTorch counts on the DTensor those
    that are made through it, and on its shard the others.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: str
    local: torch.Tensor
    fit: Fit | None
    changes: Callable[[], int]

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def shards_of(name: str, tensor: torch.Tensor, like: DTensor | None = None) -> Shards:
    """A tensor by its name in a checkpoint. ``like``: the DTensor whose local shard has the shape of the plain ``tensor``.

    Raises InputError for a tensor whose elements are not those of a tensor of its shape: one without values, a partial or sparse
    one, a subclass, and a shard whose shape is not that of its placements.
    """
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise InputError(
            f"'{name}' has no shape yet: call the module with a first batch, which makes its lazy parameters."
        )
    placed = tensor if isinstance(tensor, DTensor) else like
    detached = tensor.detach()
    local = detached.to_local() if isinstance(detached, DTensor) else detached
    _require_elements(name, tensor, local)

    def changes() -> int:
        return changes_of(tensor) + changes_of(local)

    if placed is None:
        shape = tuple(tensor.shape)
        rows = tuple(((0, size),) if size else () for size in shape)
        return Shards(
            name=name,
            shape=shape,
            dtype=tensor.dtype,
            spec="",
            local=local,
            fit=Fit(nested=rows, placed=rows),
            changes=changes,
        )
    shape, mesh = tuple(placed.shape), placed.device_mesh
    require_in_order(mesh, f"'{name}': its DeviceMesh")
    here = mesh.get_coordinate()
    spec = " ".join(map(str, placed.placements)) + f" on {' x '.join(map(str, mesh.shape))}"
    known = tuple(_placement(name, one, len(shape)) for one in placed.placements)
    found = None
    if here is not None:
        found = fit(shape, known, tuple(mesh.shape), here, tuple(local.shape))
        if found is None:
            raise InputError(
                f"'{name}': this rank holds {tuple(local.shape)}, and no shard of {shape} under {spec} has that shape. Where "
                f"the DTensor was made by from_local, give it the shape and the stride of the unsharded tensor."
            )
    return Shards(name=name, shape=shape, dtype=tensor.dtype, spec=spec, local=local, fit=found, changes=changes)


def require_in_order(mesh: DeviceMesh, what: str) -> None:
    """Raises InputError, on all ranks, where ranks do not ascend along each dim of any program's mesh.

    Process groups have them in ascending order, and PyTorch makes some shards in that order and others in the mesh's: no one can say
    which shard a rank holds.
    """
    for dim in range(mesh.ndim):
        of_groups = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim))
        wrong = of_groups[(of_groups.diff(dim=-1) <= 0).any(-1)]
        if len(wrong):
            name = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else str(dim)
            raise InputError(
                f"{what} has the ranks {wrong[0].tolist()} along '{name}', and their process group has them in ascending order. Make the "
                f"mesh of ranks that ascend along each dim, as init_device_mesh does."
            )


def readings(shards: Sequence[Shards], members: Members) -> Mapping[str, Reading]:
    """How the placements of each tensor are to be read, by all ranks alike, from the shapes that all of them hold.

    Raises InputError where the ranks' shapes contradict each other.
    """
    votes = [vote for one in shards for vote in votes_of(one)]
    found, contradicted = agreed(members.all_do("the shapes of shards", lambda: dict(votes)))
    require_one_reading(contradicted)
    return found


def votes_of(one: Shards) -> Sequence[tuple[str, Reading]]:
    """What this rank knows of the reading of a tensor: nothing where both readings give its shape."""
    return [(one.name, one.fit.reading)] if one.fit is not None and one.fit.reading is not None else []


def require_one_reading(contradicted: frozenset[str]) -> None:
    if contradicted:
        raise InputError(
            f"{names_of(sorted(contradicted))}: the shapes that the ranks hold are neither those of `fully_shard` nor those of "
            f"`distribute_tensor` under its placements."
        )


def boxes_of(one: Shards, reading: Reading | None = None) -> tuple[LocalBox, ...]:
    """The boxes that this rank holds, several where its rows have gaps."""
    if one.fit is None:
        return ()
    return one.fit.boxes(reading if one.fit.ambiguous else None)


def held(one: Shards, reading: Reading | None = None, lasts: Lasts = "now") -> HeldTensor:
    """The tensor for a save. Elements are copied to the host when they are read. ``lasts``: as of ``OwnedBox``."""
    now = now_on(one.local.device)
    before = one.changes() if lasts == "until the update" else None

    def copy(place: Box, earlier: np.ndarray | None) -> np.ndarray:
        found = copied_bits(lambda: one.local[place.slices], now, earlier)
        if before is not None and one.changes() != before:
            raise CheckpointError(
                f"'{one.name}' was changed while it was copied, so this step cannot be saved. Saver(overlap=True) is for "
                f"parameters that change only in the step of the optimizer that it is given: before any other change, call wait_copied()."
            )
        return found

    return HeldTensor(
        info=TensorInfo(name=one.name, shape=one.shape, dtype=one.dtype_name, spec=one.spec),
        shards=tuple(
            HeldShard(each.box, _reader(one.local, each.local), lasts, partial(copy, each.local))
            for each in boxes_of(one, reading)
        ),
    )


def require_memory(one: Shards) -> None:
    """Raises InputError for a tensor that no load can fill: whose elements share memory, as those of ``expand`` do."""
    if any(size > 1 and stride == 0 for size, stride in zip(one.local.shape, one.local.stride(), strict=True)):
        raise InputError(
            f"'{one.name}': several of its elements are one place in memory, so it cannot be loaded into. Give the module a copy: "
            f"tensor.clone()."
        )


@torch.no_grad()
def fill(one: Shards, source: Reads, dtype: str, reading: Reading | None = None) -> None:
    """Read this rank's boxes of a tensor into its memory, cast to its dtype. ``dtype``: that of the checkpoint.

    Raises CheckpointError for what cannot be read, DamagedError for damaged bytes.
    """
    places = [each for each in boxes_of(one, reading) if each.box.size]
    found = source.read_boxes(one.name, [each.box for each in places], raw=True)
    for each, raw in zip(places, found, strict=True):
        one.local[each.local.slices].copy_(tensor_of(raw, torch_dtype(dtype)))


def tensor_of(raw: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Opaque elements of a checkpoint as a tensor of this dtype, on the host."""
    bits = raw.view(np.dtype(f"<i{dtype.itemsize}") if dtype.itemsize > 1 else np.uint8)
    return torch.from_numpy(np.ascontiguousarray(bits)).view(dtype).view(raw.shape)


def raw_of(tensor: torch.Tensor) -> np.ndarray:
    """``bits_of`` a tensor, row by row."""
    return bits_of(tensor.detach().cpu().contiguous())


def _reader(local: torch.Tensor, place: Box) -> Callable[[], np.ndarray]:
    return lambda: raw_of(local[place.slices])


def _require_elements(name: str, tensor: torch.Tensor, local: torch.Tensor) -> None:
    if local.is_meta:
        raise InputError(f"'{name}' is on the meta device: it has no values. Call to_empty, and initialise or load it.")
    if local.layout != torch.strided or local.is_quantized:
        raise InputError(
            f"'{name}' is {local.layout}{' and quantized' if local.is_quantized else ''}: save dense tensors."
        )
    kind = type(local)
    if getattr(kind, "__torch_dispatch__") is not PLAIN:  # noqa: B009
        raise InputError(
            f"'{name}' is a {kind.__module__}.{kind.__qualname__}, whose elements are not its memory. Save the tensors that it "
            f"consists of, each under its name."
        )
    if isinstance(tensor, DTensor) and any(isinstance(one, TorchPartial) for one in tensor.placements):
        raise InputError(f"'{name}' is partial: its value is a sum over ranks. Reduce it first, by redistribute.")


def _placement(name: str, one: TorchPlacement, num_dims: int) -> Placement:
    if isinstance(one, TorchReplicate):
        return Replicate()
    factor = getattr(one, "split_factor", 1)
    # `_StridedShard` is private, and not a Shard in all versions: it has a split factor.
    if not isinstance(one, TorchShard) and not hasattr(one, "split_factor"):
        raise InputError(f"'{name}' has the placement {one}: only Shard, Replicate and strided shards are known.")
    dim = int(getattr(one, "dim"))  # noqa: B009
    dim = dim + num_dims if dim < 0 else dim
    return Shard(dim) if factor == 1 else StridedShard(dim, int(factor))
