"""How the product of two quantized operands is computed: a table of kernels, tried in order, and what each needs.

| kernel | library | device | what it multiplies |
|---|---|---|---|
| nvfp4 | XLA | NVIDIA from 10.0 | codes of E2M1, and their E4M3 scales; scales of tensors after the sum |
| nvfp4 | PyTorch | NVIDIA from 10.0, CUDA from 12.8 | the same, with the scales of tensors |
| mx | XLA | NVIDIA from 10.0 | FP8 codes, and a power of two for each 32 of the contracted dim |
| mx of experts | PyTorch | NVIDIA 10.0, CUDA from 12.8 | the same of codes in E4M3, for the rows and matrices of all experts in one call |
| mx | PyTorch | NVIDIA from 10.0, CUDA from 12.8 | codes in E4M3 as JAX |
| fp8 | both | NVIDIA from 8.9 | FP8 codes; scales after the sum |
| fp8 by blocks | PyTorch | NVIDIA 9, CUDA from 12.9 | FP8 codes; the sum of each 128 of the contracted dim is scaled and added in float32 |
| bfloat16 | XLA | NVIDIA from 8.0, TPU | codes times the scales that leave them exact in bfloat16; other scales after the sum |
| float32 | both | everywhere | values: codes times scales |

All but the last two multiply codes, at the rate of their format. The others dequantize. ``mx`` takes blocks of 128 whose scales are
powers of two as four blocks of 32 with one scale, which are the same values. On an H100 JAX has no kernel for them: a loop of XLA's
products writes the sums of all outputs to memory for each 128 terms, and its Triton kernels multiply FP8 there as float16.

PyTorch has products of codes for AMD too, of ``mx`` on gfx950 alone and with scales in the order of their blocks (``ScaledBlas.cpp``); none
was checked, so that chips of AMD multiply values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwright.core.engines.engines import ENGINES, Engine
from shardwright.core.engines.properties import ProductLibrary
from shardwright.core.recipes.formats import E2M1, E4M3, E5M2, E8M0
from shardwright.core.recipes.recipe import ENTIRE, OPERANDS, Operand, Product, Quantizer

Quantizers = Mapping[tuple[Product, Operand], Quantizer]
KernelName = Literal["nvfp4", "mx of experts", "mx", "fp8", "fp8 by blocks", "bfloat16", "float32"]
Version = tuple[int, int]

MX_BLOCK, NVFP4_BLOCK, LARGE_BLOCK = 32, 16, 128
"""The extents along the contracted dim that the kernels for block scales take."""


NEWEST: Version = (99, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What multiplies. ``kind``: a GPU is one of NVIDIA. ``capability``: the compute capability of a GPU, as (9, 0).

    ``cuda``: that PyTorch was built for, and ``of_experts``: whether it was built with products of all experts in one call. A plan
    takes the newest, with all that it has; the engine asks PyTorch.
    """

    kind: Literal["CPU", "GPU", "TPU"] = "CPU"
    capability: Version = (0, 0)
    cuda: Version = NEWEST
    of_experts: bool = True


CPU = Device()


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowProduct:
    """A product of two quantized operands. ``experts``: of the rows and matrices of experts. ``dtype``: of the computation."""

    product: Product
    operands: tuple[Quantizer, Quantizer]
    library: ProductLibrary = "xla"
    experts: bool = False
    dtype: str = "bfloat16"


class Tiles(NamedTuple):
    """Elements that sizes of a kernel's operands are filled up to multiples of, with codes of 0: along the contracted dim, and the rows of
    the first and of the second operand. PyTorch refuses others."""

    contracted: int = 1
    first: int = 1
    second: int = 1


NO_TILES = Tiles()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductKernel:
    """One kernel of the table. ``least``, ``most``: the compute capabilities that have it. ``cuda``: the first that has it.
    ``needs``: names of ``NEEDS``. ``rate``: the dtype at whose rate it multiplies. ``of_experts``: all experts in one call.
    ``swizzled``: scales in tiles of 128 rows and 4 blocks (``engine_torch/precision/scales.py``). ``source``: of all this."""

    name: KernelName
    library: ProductLibrary
    least: Version
    needs: tuple[str, ...]
    rate: Literal["float4", "float8", "bfloat16", "float32"]
    source: str
    most: Version = NEWEST
    cuda: Version = (0, 0)
    on_tpu: bool = False
    of_experts: bool = False
    tiles: Tiles = NO_TILES
    swizzled: bool = False

    @property
    def of_codes(self) -> bool:
        """Whether it multiplies codes, and not their values."""
        return self.rate in ("float4", "float8")

    def is_on(self, device: Device) -> bool:
        if self.name == "float32":
            return True
        if device.kind == "GPU":
            built = self.cuda <= device.cuda and (device.of_experts or not self.of_experts)
            return built and self.least <= device.capability <= self.most
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
    "a result in bfloat16": lambda product: product.dtype == "bfloat16",
    # Blocks of an expert's rows begin with its first row, and JAX's loop over blocks of rows may begin elsewhere.
    "no blocks of an expert's tokens": lambda product: (
        not product.experts or product.product != "weight_gradient" or all(map(_entire, product.operands))
    ),
    "rows of experts": lambda product: product.experts,
    "values that bfloat16 has": _every(
        lambda q: _entire(q) or q.scale.dtype in (E8M0, E4M3) or q.scale.rule != "exact"
    ),
}  # fmt: skip

_NVFP4, _EIGHT, _ROWS, _ONE_E4M3, _POWERS, _MX, _E4M3, _LARGE, _ONE_SIDE, _BF16, _TOKENS, _EXPERTS, _EXACT = NEEDS

REASONS: Mapping[str, Callable[[NarrowProduct], str]] = {
    _TOKENS: lambda _: "JAX multiplies no codes in blocks of an expert's tokens",
    _BF16: lambda product: f"PyTorch's products of codes give bfloat16, and the computation is in {product.dtype}",
}
"""What to say of a product that lacks nothing else."""

_JAX = "jax.nn.scaled_matmul and jax.lax.dot_general, docs.jax.dev; what XLA makes of them: docs/compiled.md, 2026-11"
_SCALED_MM = "torch.nn.functional.scaled_mm of PyTorch 2.10 to 2.14: ScaledBlas.cpp and CUDAScaledBlas.cpp, 2026-11"
_BLOCK_SCALES = f"{_SCALED_MM}; docs.nvidia.com/cuda/cublas, block scaling"
_GROUPED = (
    "torch.nn.functional.scaled_grouped_mm of PyTorch 2.10 to 2.14 with USE_MSLK: GroupedBlas.cpp, and evaluate_platform_supports_"
    "mxfp8_grouped_gemm of its tests, 2026-11"
)
_VALUES = "a product of float32"

KERNELS = (
    ProductKernel(name="nvfp4", library="xla", least=(10, 0), needs=(_NVFP4, _TOKENS), rate="float4", source=_JAX),
    ProductKernel(
        name="mx", library="xla", least=(10, 0), needs=(_EIGHT, _MX, _POWERS, _TOKENS), rate="float8", source=_JAX
    ),
    ProductKernel(
        name="fp8", library="xla", least=(8, 9), needs=(_EIGHT, _ROWS, _ONE_E4M3), rate="float8", source=_JAX
    ),
    ProductKernel(
        name="bfloat16", library="xla", least=(8, 0), needs=(_EXACT,), rate="bfloat16", on_tpu=True, source=_JAX
    ),
    ProductKernel(name="float32", library="xla", least=(0, 0), needs=(), rate="float32", source=_VALUES),
    ProductKernel(
        name="nvfp4",
        library="aten",
        least=(10, 0),
        cuda=(12, 8),
        needs=(_NVFP4, _BF16),
        rate="float4",
        tiles=Tiles(contracted=32, second=16),
        swizzled=True,
        source=_BLOCK_SCALES,
    ),
    ProductKernel(
        name="mx of experts",
        library="aten",
        least=(10, 0),
        most=(10, 0),
        cuda=(12, 8),
        needs=(_E4M3, _MX, _POWERS, _EXPERTS, _BF16),
        rate="float8",
        of_experts=True,
        tiles=Tiles(contracted=32, first=32, second=16),
        swizzled=True,
        source=_GROUPED,
    ),
    ProductKernel(
        name="mx",
        library="aten",
        least=(10, 0),
        cuda=(12, 8),
        needs=(_E4M3, _MX, _POWERS, _BF16),
        rate="float8",
        tiles=Tiles(contracted=32, second=16),
        swizzled=True,
        source=_BLOCK_SCALES,
    ),
    ProductKernel(
        name="fp8",
        library="aten",
        least=(8, 9),
        needs=(_EIGHT, _ROWS, _ONE_E4M3, _BF16),
        rate="float8",
        tiles=Tiles(contracted=16, second=16),
        source=_SCALED_MM,
    ),
    ProductKernel(
        name="fp8 by blocks",
        library="aten",
        least=(9, 0),
        most=(9, 99),
        cuda=(12, 9),
        needs=(_E4M3, _LARGE, _ONE_SIDE, _BF16),
        rate="float8",
        tiles=Tiles(contracted=LARGE_BLOCK, second=LARGE_BLOCK),
        source=_BLOCK_SCALES,
    ),
    ProductKernel(name="float32", library="aten", least=(0, 0), needs=(), rate="float32", source=_VALUES),
)
"""Those of each library in the order in which they are tried."""


def kernel_named(name: KernelName, library: ProductLibrary) -> ProductKernel:
    """The row of the table."""
    return next(kernel for kernel in KERNELS if (kernel.name, kernel.library) == (name, library))


def choose_product_kernel(device: Device, product: NarrowProduct) -> ChosenKernel:
    """The first kernel of the library that the device has and whose needs are met.

    >>> from shardwright.core.recipes.presets import preset
    >>> def chosen(recipe, device, product="output", operands=("input", "weight"), **more):
    ...     quantizers = tuple(preset(recipe).quantizers[product, operand] for operand in operands)
    ...     return choose_product_kernel(device, NarrowProduct(product=product, operands=quantizers, **more))
    >>> h100, b200 = Device(kind="GPU", capability=(9, 0)), Device(kind="GPU", capability=(10, 0))
    >>> [chosen("mxfp8", device).name for device in (CPU, Device(kind="TPU"), h100, b200)]
    ['float32', 'bfloat16', 'bfloat16', 'mx']
    >>> [chosen(recipe, h100).name for recipe in ("fp8-row", "fp8-current", "fp8-block", "nvfp4")]
    ['fp8', 'fp8', 'bfloat16', 'bfloat16']
    >>> [chosen(recipe, h100, library="aten").name for recipe in ("fp8-row", "fp8-current", "fp8-block", "mxfp8")]
    ['fp8', 'fp8', 'fp8 by blocks', 'float32']
    >>> [chosen(recipe, b200, library="aten").name for recipe in ("fp8-row", "fp8-block", "mxfp8", "nvfp4")]
    ['fp8', 'mx', 'mx', 'nvfp4']
    >>> chosen("mxfp8", b200, library="aten", experts=True).name
    'mx of experts'
    >>> chosen("mxfp8", h100).why
    "'mx' needs compute capability 10.0"
    """
    there = [kernel for kernel in KERNELS if kernel.library == product.library]
    fitting = [kernel for kernel in there if all(NEEDS[need](product) for need in kernel.needs)]
    kernel = next(kernel for kernel in fitting if kernel.is_on(device))
    return ChosenKernel(kernel=kernel, why="" if kernel.of_codes else _why(device, product, there))


def _why(device: Device, product: NarrowProduct, kernels: Sequence[ProductKernel]) -> str:
    """Why none of a library's kernels multiplies the codes of a product."""
    if device.kind != "GPU":
        return "the chip multiplies no codes"
    unmet = [
        (kernel, [need for need in kernel.needs if not NEEDS[need](product)]) for kernel in kernels if kernel.of_codes
    ]
    lacking = [kernel for kernel, needs in unmet if not needs]
    if lacking:
        nearest = min(lacking, key=lambda kernel: (kernel.least, kernel.of_experts))
        if device.capability > nearest.most:
            return f"'{nearest.name}' is for compute capability {nearest.least[0]} only"
        if device.capability < nearest.least:
            return f"'{nearest.name}' needs compute capability {nearest.least[0]}.{nearest.least[1]}"
        return f"'{nearest.name}' needs a PyTorch that was built for CUDA {nearest.cuda[0]}.{nearest.cuda[1]}"
    for _, needs in unmet:
        if len(needs) == 1 and needs[0] in REASONS:
            return REASONS[needs[0]](product)
    return "no kernel takes their formats, blocks and scales"


def product_kernels(
    quantizers: Quantizers, device: Device, engine: Engine, *, experts: bool, dtype: str
) -> dict[Product, ChosenKernel]:
    """The kernel of each product of which both operands are quantized."""
    chosen: dict[Product, ChosenKernel] = {}
    library = ENGINES[engine].product_library
    for product, (left, right) in OPERANDS.items():
        pair = quantizers.get((product, left)), quantizers.get((product, right))
        if pair[0] is not None and pair[1] is not None:
            narrow = NarrowProduct(
                product=product, operands=(pair[0], pair[1]), library=library, experts=experts, dtype=dtype
            )
            chosen[product] = choose_product_kernel(device, narrow)
    return chosen
