"""How the product of two quantized operands is computed: a table of kernels, tried in order, and what each needs.

| kernel | engine | device | what it multiplies |
|---|---|---|---|
| nvfp4 | JAX | NVIDIA from 10.0 | codes of E2M1, and their E4M3 scales; scales of tensors after the sum |
| mx | JAX | NVIDIA from 10.0 | FP8 codes, and a power of two for each 32 of the contracted dim |
| fp8 | both | NVIDIA from 8.9 | FP8 codes; scales after the sum |
| fp8 by blocks | PyTorch | NVIDIA 9 | FP8 codes; the sum of each 128 of the contracted dim is scaled and added in float32 |
| bfloat16 | JAX | NVIDIA from 8.0, TPU | codes times the scales that leave them exact in bfloat16; other scales after the sum |
| float32 | both | everywhere | values: codes times scales |

The first four multiply codes, at the rate of their format. The others dequantize. ``mx`` takes blocks of 128 whose scales are
powers of two as four blocks of 32 with one scale, which are the same values. On an H100 JAX has no kernel for them: a loop of XLA's
products writes the sums of all outputs to memory for each 128 terms, and its Triton kernels multiply FP8 there as float16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from shardwright.core.recipes.formats import E2M1, E4M3, E5M2, E8M0
from shardwright.core.recipes.recipe import ENTIRE, OPERANDS, Operand, Product, Quantizer

Quantizers = Mapping[tuple[Product, Operand], Quantizer]
KernelName = Literal["nvfp4", "mx", "fp8", "fp8 by blocks", "bfloat16", "float32"]

MX_BLOCK, NVFP4_BLOCK, LARGE_BLOCK = 32, 16, 128
"""The extents along the contracted dim that the kernels for block scales take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What multiplies. ``kind``: a GPU is one of NVIDIA. ``capability``: the compute capability of a GPU, as (9, 0)."""

    kind: Literal["CPU", "GPU", "TPU"] = "CPU"
    capability: tuple[int, int] = (0, 0)


CPU = Device()


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowProduct:
    """A product of two quantized operands. ``experts``: of the rows and matrices of experts. ``dtype``: of the computation."""

    product: Product
    operands: tuple[Quantizer, Quantizer]
    engine: Literal["jax", "torch"] = "jax"
    experts: bool = False
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductKernel:
    """One kernel of the table. ``least``, ``most``: the compute capabilities that have it. ``needs``: names of
    ``NEEDS``. ``rate``: the dtype at whose rate it multiplies."""

    name: KernelName
    least: tuple[int, int]
    needs: tuple[str, ...]
    rate: Literal["float4", "float8", "bfloat16", "float32"]
    engines: tuple[str, ...] = ("jax",)
    most: tuple[int, int] = (99, 0)
    on_tpu: bool = False

    @property
    def of_codes(self) -> bool:
        """Whether it multiplies codes, and not their values."""
        return self.rate in ("float4", "float8")

    def is_on(self, device: Device) -> bool:
        if self.name == "float32":
            return True
        if device.kind == "GPU":
            return self.least <= device.capability <= self.most
        return device.kind == "TPU" and self.on_tpu


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenKernel:
    """The kernel of a product. ``why``: what kernels that multiply codes lack, as half a sentence; empty where it is one of them."""

    kernel: ProductKernel
    why: str = ""

    @property
    def name(self) -> KernelName:
        return self.kernel.name


def _entire(quantizer: Quantizer) -> bool:
    return quantizer.block.contracted is ENTIRE


def _power_of_two(quantizer: Quantizer) -> bool:
    return quantizer.scale.rule != "exact" and not quantizer.scale.of_tensor


def _blocks_of(quantizer: Quantizer, extent: int) -> bool:
    contracted = quantizer.block.contracted
    return contracted is not None and contracted % extent == 0


def _every(holds: Callable[[Quantizer], bool]) -> Callable[[NarrowProduct], bool]:
    return lambda product: all(map(holds, product.operands))


NEEDS: Mapping[str, Callable[[NarrowProduct], bool]] = {
    "E2M1 with E4M3 scales of 16": _every(
        lambda q: q.dtype == E2M1 and q.scale.dtype == E4M3 and q.block.contracted == NVFP4_BLOCK
    ),
    "operands of 8 bits": _every(lambda q: q.dtype in (E4M3, E5M2)),
    "one scale for each row or tensor": _every(_entire),
    "an operand in E4M3": lambda product: any(q.dtype == E4M3 for q in product.operands),
    "scales that are powers of two": _every(_power_of_two),
    "blocks of 32 or a multiple": _every(lambda q: _blocks_of(q, MX_BLOCK)),
    "both operands in E4M3": _every(lambda q: q.dtype == E4M3),
    "blocks of 128": _every(lambda q: q.block.contracted == LARGE_BLOCK and q.block.other in (1, LARGE_BLOCK)),
    "blocks of 1 x 128 on one side": lambda product: product.operands[0].block.other == 1,
    # PyTorch's products of codes give it.
    "a result in bfloat16": lambda product: product.engine == "jax" or product.dtype == "bfloat16",
    # Blocks of an expert's rows begin with its first row, and a loop over blocks of rows may begin elsewhere.
    "no blocks of an expert's tokens": lambda product: (
        product.engine == "torch"
        or not product.experts
        or product.product != "weight_gradient"
        or all(map(_entire, product.operands))
    ),
    "values that bfloat16 has": _every(
        lambda q: _entire(q) or q.scale.dtype in (E8M0, E4M3) or q.scale.rule != "exact"
    ),
}  # fmt: skip

_NVFP4, _EIGHT, _ROWS, _ONE_E4M3, _POWERS, _MX, _E4M3, _LARGE, _ONE_SIDE, _BF16, _TOKENS, _EXACT = NEEDS

KERNELS = (
    ProductKernel(name="nvfp4", least=(10, 0), needs=(_NVFP4, _TOKENS), rate="float4"),
    ProductKernel(name="mx", least=(10, 0), needs=(_EIGHT, _MX, _POWERS, _TOKENS), rate="float8"),
    ProductKernel(
        name="fp8", least=(8, 9), needs=(_EIGHT, _ROWS, _ONE_E4M3, _BF16), rate="float8", engines=("jax", "torch")
    ),
    ProductKernel(
        name="fp8 by blocks",
        least=(9, 0),
        most=(9, 99),
        needs=(_E4M3, _LARGE, _ONE_SIDE, _BF16),
        rate="float8",
        engines=("torch",),
    ),
    ProductKernel(name="bfloat16", least=(8, 0), needs=(_EXACT,), rate="bfloat16", on_tpu=True),
    ProductKernel(name="float32", least=(0, 0), needs=(), rate="float32", engines=("jax", "torch")),
)
"""In the order in which they are tried."""

FLOAT32 = ChosenKernel(kernel=KERNELS[-1], why="the device multiplies no codes")


def choose_product_kernel(device: Device, product: NarrowProduct) -> ChosenKernel:
    """The first kernel that the device has and whose needs are met.

    >>> from shardwright.core.recipes.presets import preset
    >>> def chosen(recipe, device, product="output", operands=("input", "weight"), **more):
    ...     quantizers = tuple(preset(recipe).quantizers[product, operand] for operand in operands)
    ...     return choose_product_kernel(device, NarrowProduct(product=product, operands=quantizers, **more))
    >>> h100, b200 = Device(kind="GPU", capability=(9, 0)), Device(kind="GPU", capability=(10, 0))
    >>> [chosen("mxfp8", device).name for device in (CPU, Device(kind="TPU"), h100, b200)]
    ['float32', 'bfloat16', 'bfloat16', 'mx']
    >>> [chosen(recipe, h100).name for recipe in ("fp8-row", "fp8-current", "fp8-block", "nvfp4")]
    ['fp8', 'fp8', 'bfloat16', 'bfloat16']
    >>> [chosen(recipe, h100, engine="torch").name for recipe in ("fp8-row", "fp8-current", "fp8-block", "mxfp8")]
    ['fp8', 'fp8', 'fp8 by blocks', 'float32']
    >>> chosen("mxfp8", h100).why
    "'mx' needs compute capability 10.0"
    """
    lacking: list[str] = []
    for kernel in KERNELS:
        unmet = [need for need in kernel.needs if not NEEDS[need](product)]
        fits = not unmet and product.engine in kernel.engines
        if fits and kernel.is_on(device):
            return ChosenKernel(kernel=kernel, why="" if kernel.of_codes else _why(device, product, lacking))
        if fits and kernel.of_codes:
            lacking.append(kernel.name)
    raise AssertionError(product)


def _why(device: Device, product: NarrowProduct, lacking: list[str]) -> str:
    """Why no kernel multiplies the codes of a product. ``lacking``: those that would, and that the device does not have."""
    if device.kind != "GPU":
        return "the chip multiplies no codes"
    if lacking:
        one = next(kernel for kernel in KERNELS if kernel.name == lacking[0])
        if device.capability > one.most:
            return f"'{one.name}' is for compute capability {one.least[0]} only"
        return f"'{one.name}' needs compute capability {one.least[0]}.{one.least[1]}"
    if not NEEDS[_TOKENS](product):
        return "JAX multiplies no codes in blocks of an expert's tokens"
    if not NEEDS[_BF16](product):
        return f"PyTorch's products of codes give bfloat16, and the computation is in {product.dtype}"
    return "no kernel takes their formats, blocks and scales"


def product_kernels(
    quantizers: Quantizers, device: Device, engine: Literal["jax", "torch"], *, experts: bool, dtype: str
) -> dict[Product, ChosenKernel]:
    """The kernel of each product of which both operands are quantized."""
    found: dict[Product, ChosenKernel] = {}
    for product, (left, right) in OPERANDS.items():
        pair = quantizers.get((product, left)), quantizers.get((product, right))
        if pair[0] is not None and pair[1] is not None:
            one = NarrowProduct(
                product=product, operands=(pair[0], pair[1]), engine=engine, experts=experts, dtype=dtype
            )
            found[product] = choose_product_kernel(device, one)
    return found
