"""The quantized operands of each weight's products: one object for each weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, gcd, prod

from shardwright.core.engines.engines import Engine
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.recipes.formats import bits_of
from shardwright.core.recipes.kernels import ChosenKernel, Device, Quantizers, product_kernels
from shardwright.core.recipes.recipe import Dim, Operand, Product, Quantizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedDim:
    """One of the three dims of a product: logical axes, merged major first, with their sizes and the mesh axes of each that are
    larger than 1.

    >>> mesh = Mesh.of(tensor=4)
    >>> heads = ShardedDim(names=("heads", "head_dim"), sizes=(8, 64), sharding=(("tensor",), ()))
    >>> heads.size, heads.axes, heads.on_device(mesh), heads.grain(mesh)
    (512, ('tensor',), 128, 128)
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    sharding: tuple[tuple[str, ...], ...]

    @property
    def size(self) -> int:
        return prod(self.sizes)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axes in self.sharding for axis in axes)

    def on_device(self, mesh: Mesh) -> int:
        """Elements of the largest shard."""
        if self._only_first_is_sharded:
            # PyTorch shards the merged dim, so that a shard may end inside a head.
            return ceil(self.size / mesh.size(self.axes))
        return prod(ceil(size / mesh.size(axes)) for size, axes in zip(self.sizes, self.sharding, strict=True))

    def grain(self, mesh: Mesh) -> int:
        """The largest number of which every boundary between two shards is a multiple; the entire dim if it is unsharded."""
        if self._only_first_is_sharded:
            return self.on_device(mesh)
        found, inner = self.size, self.size
        for size, axes in zip(self.sizes, self.sharding, strict=True):
            inner //= size
            if axes:
                found = gcd(found, ceil(size / mesh.size(axes)) * inner)
        return found

    @property
    def _only_first_is_sharded(self) -> bool:
        return not any(self.sharding[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Freedom:
    """Whether the layout can move what is quantized. ``reduced``: it is free because the amax is reduced over these axes.
    ``reason``: why it is not free, as half a sentence; empty where it is. ``ends_inside``: the reason is that shards end
    inside blocks."""

    reduced: tuple[str, ...] = ()
    reason: str = ""
    ends_inside: bool = False

    @property
    def free(self) -> bool:
        return not self.reason

    @property
    def text(self) -> str:
        """
        >>> Freedom().text, Freedom(reduced=("fsdp", "tensor")).text, Freedom(reason="rows differ").text
        ('free', 'free: amax reduced over fsdp, tensor', 'not free: rows differ')
        """
        if self.reason:
            return f"not free: {self.reason}"
        return f"free: amax reduced over {', '.join(self.reduced)}" if self.reduced else "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedOperand:
    """One operand of one product of a weight. ``dims``: its two dims where it is quantized. ``experts``: on a device; each
    expert's matrix is a tensor of its own. ``reduced``: the axes over which its amax is reduced. ``values``: how many amaxes
    a device reduces at a time. ``same_amax``: operands with an equal key share them. ``shards``: in how many parts it is
    multiplied, as a ring passes them on; each has amaxes of its own."""

    product: Product
    operand: Operand
    quantizer: Quantizer
    dims: Mapping[Dim, ShardedDim]
    experts: int
    reduced: tuple[str, ...]
    values: int
    same_amax: tuple[str, ...]
    freedom: Freedom
    shards: int = 1

    @property
    def extents(self) -> Mapping[Dim, int | None]:
        """The extent of its blocks along each of its dims."""
        return self.quantizer.block.extents(self.product, self.operand)

    def num_scales(self, mesh: Mesh) -> int:
        """Scales of its blocks on one device; the one of the entire tensor is not among them."""
        local = {dim: sharded.on_device(mesh) for dim, sharded in self.dims.items()}
        return self.experts * prod(1 if e is None else ceil(local[dim] / e) for dim, e in self.extents.items())

    def to_json(self) -> dict[str, object]:
        quantizer = self.quantizer
        return {
            "product": self.product,
            "operand": self.operand,
            "dtype": quantizer.dtype,
            "block": quantizer.block.text,
            "scale_dtype": quantizer.scale.dtype,
            "amax": quantizer.amax,
            "axes": {dim: list(sharded.axes) for dim, sharded in self.dims.items()},
            "amax_axes": list(self.reduced),
            "amax_values": self.values,
            "free": self.freedom.free,
            "freedom": self.freedom.text,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SentArray:
    """Codes or scales of one layer of a weight, in the order of dims of the formula of quantizers. ``shape``: of all of it, with
    the padding of shards. ``per``: elements of the weight to one entry along each dim. Codes of 4 bits are bytes of two, and scales in E8M0 are sent as bytes."""

    dtype: str
    shape: Mapping[str, int]
    per: tuple[int, ...]
    at_rest: Spec
    gathered: Spec
    in_use: Spec

    @property
    def element_bytes(self) -> int:
        return 1 if self.dtype == "uint8" else bits_of(self.dtype) // 8

    def rest_bytes(self, mesh: Mesh) -> int:
        """Bytes on a device at rest; with padding, where a dim is sharded unevenly, as experts over more devices than there are."""
        return prod(self._rest_size(mesh, name) for name in self.shape) * self.element_bytes

    @property
    def is_sent(self) -> bool:
        return self.at_rest != self.gathered

    def gathered_bytes(self, mesh: Mesh) -> int:
        """Bytes on a device after the gathers, with the padding that they send; 0 where there is none."""
        shards = {
            name: mesh.size(self.at_rest.axes_of(name)) // mesh.size(self.gathered.axes_of(name)) for name in self.shape
        }
        sizes = (self._rest_size(mesh, name) * shards[name] for name in self.shape)
        return prod(sizes) * self.element_bytes if self.is_sent else 0

    def _rest_size(self, mesh: Mesh, name: str) -> int:
        return ceil(self.shape[name] / mesh.size(self.at_rest.axes_of(name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """What is gathered of a weight for some of its products. ``quantizer`` None: the weight in its gather dtype. ``arrays``:
    codes, scales, and the second scale of the tensor where there is one."""

    products: tuple[Product, ...]
    quantizer: Quantizer | None
    arrays: tuple[SentArray, ...]

    @property
    def is_sent(self) -> bool:
        """Whether any of it is gathered."""
        return any(array.is_sent for array in self.arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight whose products are quantized, in ``num`` of its layers. ``agrees``: the axes whose devices have one scale of
    the weight: its shard group at rest and in use, without replicas. ``codes_bytes``: of one layer in use on a device.
    ``experts``: how many there are, or None; ``expert_axes`` shard them in use. ``kernels``: of its products of two quantized
    operands on the chip of the plan; none without chips, where the device decides.
    ``copies``: what is gathered, of a weight that is quantized on its shards at rest; none of another one. ``minor_dims``: of
    such a weight, the logical axes on which its codes on a shard are no run of its codes. ``rests``: between steps a device has its
    copies in place of the weight."""

    name: str
    component: str
    stack: str | None
    num: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    agrees: tuple[str, ...]
    operands: tuple[QuantizedOperand, ...]
    codes_bytes: int
    scales_bytes: int
    experts: int | None = None
    expert_axes: tuple[str, ...] = ()
    kernels: Mapping[Product, ChosenKernel] = field(default_factory=dict)
    copies: tuple[Copy, ...] = ()
    minor_dims: tuple[str, ...] = ()
    rests: bool = False

    def rest_bytes(self, mesh: Mesh) -> int:
        """Bytes of one layer on a device between steps, of a weight that rests as its copies."""
        return sum(array.rest_bytes(mesh) for copy in self.copies for array in copy.arrays)

    @property
    def free(self) -> bool:
        return all(operand.freedom.free for operand in self.operands)

    def kernels_on(self, device: Device, engine: Engine, dtype: str) -> Mapping[Product, ChosenKernel]:
        """The kernel of each product of two quantized operands on a device; ``dtype``: of the computation."""
        quantizers: Quantizers = {(one.product, one.operand): one.quantizer for one in self.operands}
        return product_kernels(quantizers, device, engine, experts=self.experts is not None, dtype=dtype)

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "num": self.num,
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "shard_group": list(self.agrees),
            "codes_bytes": self.codes_bytes,
            "scales_bytes": self.scales_bytes,
            "free": self.free,
            **({"kernels": {product: one.name for product, one in self.kernels.items()}} if self.kernels else {}),
            "gathered_copies": len(self.copies),
            "rests": self.rests,
            "operands": [operand.to_json() for operand in self.operands],
        }
