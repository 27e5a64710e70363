"""A letter for each logical axis, as papers and einsums write dims, and what a product of dims means.

``B L M, M H D -> B L H D``: tokens with ``embed`` elements times a weight gives heads. ``M`` is contracted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from shardwright.core.findings.errors import InputError
from shardwright.core.layout.roles import ROLES, SEQUENCE_PARALLEL
from shardwright.core.model.table import Contraction

LETTERS: Mapping[str, str] = {
    "B": "batch",
    "L": "length",
    "T": "q_length",
    "S": "kv_length",
    "M": "embed",
    "H": "heads",
    "K": "kv_heads",
    "D": "head_dim",
    "E": "head_dim",
    "P": "rope_dim",
    "Q": "q_lora",
    "N": "kv_lora",
    "R": "latent",
    "F": "mlp",
    "V": "vocab",
    "Z": "scores",
    "A": "top_k",
    "X": "experts",
    "G": "groups",
    "U": "tokens",
    "C": "slots",
}
"""The logical axis of each letter. ``D`` is the width of queries and keys, ``E`` another width of a head: that of values."""

BY_BATCH = frozenset("BLTSGUC")
"""Letters whose sizes the request and the layout give."""

TOKENS = frozenset("LTSGU")
"""Letters of the tokens of a row, by what they are for: two of them are never one dim of a product by chance."""

STORAGE = ("embed", "q_lora", "kv_lora", "latent", "heads", "kv_heads", "mlp", "vocab", "scores")
"""The dims that may be a weight's storage dim, in the order in which they are tried."""

_ROOTS = {"q_length": "length"}
"""A contraction over queries is one over the tokens of their row."""


@dataclass(frozen=True, slots=True)
class Dims:
    """The dims of a product of an input with a weight."""

    input: tuple[str, ...]
    weight: tuple[str, ...]
    output: tuple[str, ...]

    @property
    def einsum(self) -> str:
        """As ``einsum`` has them.

        >>> read_product("B L M, M H D -> B L H D").einsum
        'BLM,MHD->BLHD'
        """
        return f"{''.join(self.input)},{''.join(self.weight)}->{''.join(self.output)}"

    @property
    def contracted(self) -> tuple[str, ...]:
        """Those that the output is a sum over, in the order of the weight."""
        return tuple(dim for dim in self.weight if dim in self.input and dim not in self.output)

    @property
    def added(self) -> tuple[str, ...]:
        """Those that the output has from the weight: the input's cotangent is a sum over them."""
        return tuple(dim for dim in self.output if dim not in self.input)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Those that the output has from the weight alone, in the weight's order."""
        return tuple(dim for dim in self.weight if dim not in self.input)

    @property
    def tokens(self) -> tuple[str, ...]:
        """Those that the weight does not have: its gradient is a sum over them."""
        return tuple(dim for dim in self.input if dim not in self.weight)

    @property
    def batched(self) -> tuple[str, ...]:
        """Those that all three have: a product for each."""
        return tuple(dim for dim in self.weight if dim in self.input and dim in self.output)


@cache
def read_dims(text: str) -> tuple[str, ...]:
    """The dims of one value.

    >>> read_dims("B L M")
    ('B', 'L', 'M')
    """
    dims = tuple(text.split())
    for dim in dims:
        if dim not in LETTERS:
            raise InputError(
                f"'{text}': '{dim}' is no dim. Known: {', '.join(f'{k} {v}' for k, v in LETTERS.items())}."
            )
        if dims.count(dim) > 1:
            raise InputError(f"'{text}' has '{dim}' ({LETTERS[dim]}) twice. Each dim is there once.")
    return dims


@cache
def read_product(text: str) -> Dims:
    """
    >>> read_product("B L H D, H D M -> B L M").contracted
    ('H', 'D')
    """
    operands, arrow, output = text.partition("->")
    inputs, comma, weight = operands.partition(",")
    if not arrow or not comma:
        raise InputError(f"'{text}' is not 'input, weight -> output', as in 'B L M, M H D -> B L H D'.")
    dims = Dims(read_dims(inputs.strip()), read_dims(weight.strip()), read_dims(output.strip()))
    for dim in dims.output:
        if dim not in (*dims.input, *dims.weight):
            raise InputError(f"'{text}': the output has '{dim}' ({LETTERS[dim]}), and neither operand has it.")
    for dim in dims.input:
        if dim not in (*dims.output, *dims.weight):
            raise InputError(
                f"'{text}': '{dim}' ({LETTERS[dim]}) is in the input alone. A product sums over what the weight has: "
                "give it to the output too."
            )
    for dim in dims.weight:
        if dim not in (*dims.output, *dims.input):
            raise InputError(f"'{text}': '{dim}' ({LETTERS[dim]}) is in the weight alone. Give it to the output too.")
    if not dims.contracted:
        raise InputError(
            f"'{text}' contracts no dim: it is no product. Leave a dim of both operands out of the output."
        )
    by_token = [dim for dim in dims.weight if dim in BY_BATCH]
    if by_token:
        raise InputError(
            f"'{text}': the weight has '{by_token[0]}' ({LETTERS[by_token[0]]}), which each batch gives anew."
        )
    return dims


def contractions(component: str, dims: tuple[str, ...]) -> tuple[Contraction, ...]:
    """What a sum over dims is on devices: those of them that a role can shard in the component.

    >>> contractions("attention", ("H", "D")), contractions("residual", ("B", "L", "M")), contractions("attention", ("S", "T"))
    ((('attention', 'heads'),), (('residual', 'batch'), ('residual', 'length')), (('attention', 'length'),))
    """
    return tuple((component, _ROOTS.get(axis, axis)) for dim in dims if (axis := LETTERS[dim]) in shardable(component))


@cache
def shardable(component: str) -> frozenset[str]:
    """The logical axes of activations that some role shards in a component."""
    axes = {axis for role in ROLES.values() if component in role.components for axis in role.activations}
    return frozenset(axes | ({SEQUENCE_PARALLEL[1]} if component == SEQUENCE_PARALLEL[0] else set()))


@cache
def sharded_together(contracted: Contraction) -> tuple[str, frozenset[str]]:
    """A contraction by the roles that make it one between devices: query heads and KV heads are sharded together."""
    component, axis = contracted
    return component, frozenset(role.name for role in ROLES.values() if axis in role.activations)
