"""A recipe: how each operand of the three products of a linear layer is quantized.

With tokens t, inputs k and outputs n, input X, weight W and output gradient G:

| product | sum | contracts |
|---|---|---|
| ``output`` | Y[t,n] = sum over k of X[t,k] W[k,n] | k |
| ``input_gradient`` | dX[t,k] = sum over n of G[t,n] W[k,n] | n |
| ``weight_gradient`` | dW[k,n] = sum over t of X[t,k] G[t,n] | t |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from shardwright.core.recipes.formats import FORMATS

Product = Literal["output", "input_gradient", "weight_gradient"]
Operand = Literal["input", "weight", "output_gradient"]
Dim = Literal["tokens", "inputs", "outputs"]
"""The dims t, k and n."""

OPERANDS: Mapping[Product, tuple[Operand, Operand]] = {
    "output": ("input", "weight"),
    "input_gradient": ("output_gradient", "weight"),
    "weight_gradient": ("input", "output_gradient"),
}

DIMS: Mapping[Operand, tuple[Dim, Dim]] = {
    "input": ("tokens", "inputs"),
    "weight": ("inputs", "outputs"),
    "output_gradient": ("tokens", "outputs"),
}

CONTRACTED: Mapping[Product, Dim] = {"output": "inputs", "input_gradient": "outputs", "weight_gradient": "tokens"}

ENTIRE = None
"""An extent of a block: the entire dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The elements that share a scale: so many along the contracted dim and along the other; ``ENTIRE``: all of the dim."""

    contracted: int | None
    other: int | None

    def extents(self, product: Product, operand: Operand) -> Mapping[Dim, int | None]:
        """The extent along each dim of an operand of a product.

        >>> Block(contracted=128, other=1).extents("weight_gradient", "input")
        {'tokens': 128, 'inputs': 1}
        """
        return {dim: self.contracted if dim == CONTRACTED[product] else self.other for dim in DIMS[operand]}

    @property
    def text(self) -> str:
        """
        >>> Block(contracted=128, other=1).text, Block(contracted=None, other=1).text, Block(contracted=None, other=None).text
        ('1 x 128', 'per row', 'per tensor')
        >>> Block(contracted=1, other=None).text, Block(contracted=None, other=16).text
        ('all x 1', '16 x all')
        """
        if self.contracted is ENTIRE and self.other in (ENTIRE, 1):
            return "per tensor" if self.other is ENTIRE else "per row"
        other, contracted = ("all" if extent is ENTIRE else extent for extent in (self.other, self.contracted))
        return f"{other} x {contracted}"


PER_TENSOR = Block(contracted=ENTIRE, other=ENTIRE)
PER_ROW = Block(contracted=ENTIRE, other=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How the scale of a block follows from its amax, the largest absolute value in it. A code is a value divided by its scale.

    ``exact``: amax / largest, in float32. ``power of two up``: the least power of two that is not below it (RCEIL). ``power of
    two down``: the exponent of amax minus that of the format's largest (FLOOR, as in OCP's text). ``dtype``: that of the
    stored scale. ``of_tensor``: a second scale in float32 for the entire tensor, so that block scales fit their narrow dtype;
    it is amax of the tensor / (largest of the format x largest of ``dtype``).
    """

    rule: Literal["exact", "power of two up", "power of two down"]
    dtype: str = "float32"
    of_tensor: bool = False

    def __post_init__(self) -> None:
        assert self.dtype == "float32" or self.dtype in FORMATS, self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """How one operand of one product is quantized.

    ``amax``: of these values (``current``), or of earlier steps (``delayed``). ``rounding``: to the nearest, ties to even, or
    stochastic. ``hadamard``: the size of the random Hadamard transform along the contracted dim before it, or None; both operands of a
    product have the same.
    """

    dtype: str
    block: Block
    scale: Scale
    amax: Literal["current", "delayed"] = "current"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    hadamard: int | None = None

    def __post_init__(self) -> None:
        assert self.dtype in FORMATS, self.dtype

    @property
    def of_tensor(self) -> bool:
        """Whether a scale depends on the entire tensor: its only one, or a second one."""
        return self.block == PER_TENSOR or self.scale.of_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The delayed amax: of the last ``amax_history_len`` steps, the largest or the most recent; the scale has ``margin`` bits
    of room. It is computed again every ``interval`` steps."""

    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    margin: int = 0
    interval: int = 1

    def __post_init__(self) -> None:
        assert min(self.amax_history_len, self.interval) >= 1, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """``quantizers``: of each operand of each product; an operand without one stays in the computation's dtype, and a product
    with one such operand multiplies in that dtype.

    ``high``: patterns of weights whose products stay in the computation's dtype. ``high_layers``: so many last layers too.
    ``quantized``: patterns of weights that are quantized although their component is none of ``QUANTIZED``.
    ``reduce_amax``: whether an amax is reduced over the devices that hold parts of what shares the scale.
    ``gather_quantized``: weights are quantized on their shards at rest and gathered as codes and scales; otherwise they are
    gathered first. ``rest_quantized``: they are also kept so between steps, and made of their master weights after each step.
    ``dispatch_quantized``: tokens are quantized before they are sent to their experts, and sent as codes and scales.
    ``counter_based``: random numbers are a function of seed, step, tensor and element; otherwise each device
    draws its own. ``options``: those given that are not the default.
    """

    name: str
    quantizers: Mapping[tuple[Product, Operand], Quantizer]
    history: History | None = None
    high: tuple[str, ...] = ()
    high_layers: int = 0
    quantized: tuple[str, ...] = ()
    reduce_amax: bool = True
    gather_quantized: bool = False
    rest_quantized: bool = False
    dispatch_quantized: bool = False
    counter_based: bool = True
    source: str = ""
    options: Mapping[str, bool | int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert all(operand in OPERANDS[product] for product, operand in self.quantizers), self.name
        delayed = any(quantizer.amax == "delayed" for quantizer in self.quantizers.values())
        assert delayed == (self.history is not None), self.name
        assert self.high_layers >= 0, self.name
        assert not any(one_transformed(self.quantizers)), self.name

    @property
    def numbers(self) -> Recipe:
        """The same recipe without what changes no number: whether weights are gathered and rest as codes."""
        return replace(self, gather_quantized=False, rest_quantized=False)

    @property
    def of_codes(self) -> bool:
        """Whether what is gathered of a weight are codes and scales: so it is of those that rest as these."""
        return self.gather_quantized or self.rest_quantized


def one_transformed(quantizers: Mapping[tuple[Product, Operand], Quantizer]) -> Iterator[Product]:
    """The products whose operands have different Hadamard transforms, which would change them."""
    for product, operands in OPERANDS.items():
        found = [quantizers.get((product, operand)) for operand in operands]
        if len({None if one is None else one.hadamard for one in found}) > 1:
            yield product


QUANTIZED = ("attention", "mlp", "moe")
"""The components whose products with weights are quantized: projections of attention, feed-forward layers, experts. Router,
norms, embedding and logits stay in high precision, and so do attention's own products, which have no weight."""
