"""The three layouts of the handwritten steps, as the specs that an author would write for the model.

``fsdp``: rows and weights over every device. ``fsdp-tp``: weights also over ``tensor``, which shards the length of the residual
stream between layers. ``ep``: rows over every device, experts over ``expert``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Names = tuple[str, ...]


class Layout(NamedTuple):
    """Axes by purpose: ``batch`` shards rows, ``rest`` weights at rest, ``expert_rest`` those of the experts."""

    mesh: Mesh
    batch: Names
    rest: Names
    tensor: Names = ()
    expert: Names = ()
    expert_rest: Names = ()

    def constrain(self, array: jax.Array, *dims: Names) -> jax.Array:
        """The array, constrained to be sharded by these axes on each dim."""
        return jax.lax.with_sharding_constraint(array, self.sharding(*dims))

    def sharding(self, *dims: Names) -> NamedSharding:
        """Dims sharded by these axes, () for an unsharded dim."""
        return NamedSharding(self.mesh, PartitionSpec(*[axes or None for axes in dims]))


def layout(name: str, mesh: Mesh) -> Layout:
    """One of the three layouts, on a mesh with its axes."""
    if name == "fsdp":
        return Layout(mesh, batch=("fsdp",), rest=("fsdp",))
    if name == "fsdp-tp":
        return Layout(mesh, batch=("fsdp",), rest=("fsdp",), tensor=("tensor",))
    if name == "ep":
        both = ("fsdp", "expert")
        return Layout(mesh, batch=both, rest=both, expert=("expert",), expert_rest=("fsdp",))
    raise ValueError(name)


def at_rest(layout: Layout) -> dict[str, tuple[Names, ...]]:
    """The axes on each dim of one layer of a weight, by the end of its name; other weights are unsharded."""
    rest, tensor = layout.rest, layout.tensor
    return {
        "embedding.tokens": (tensor, rest),
        "logits.kernel": (rest, tensor),
        "attention.q": (rest, tensor, ()),
        "attention.k": (rest, tensor, ()),
        "attention.v": (rest, tensor, ()),
        "attention.o": (tensor, (), rest),
        "attention.q_down": (rest, ()),
        "attention.q_up": (rest, tensor, ()),
        "attention.kv_down": (rest, ()),
        "attention.kv_up": (rest, tensor, ()),
        "mlp.gate": (rest, tensor),
        "mlp.up": (rest, tensor),
        "mlp.down": (tensor, rest),
        "shared.gate": (rest, tensor),
        "shared.up": (rest, tensor),
        "shared.down": (tensor, rest),
        "router.kernel": (rest, ()),
        "moe.gate": (layout.expert, layout.expert_rest, ()),
        "moe.up": (layout.expert, layout.expert_rest, ()),
        "moe.down": (layout.expert, (), layout.expert_rest),
    }


def gathered(layout: Layout, layer: dict[str, jax.Array], dtype: jnp.dtype) -> dict[str, jax.Array]:
    """One layer's weights in use: matrices in ``dtype``, gathered over the axes that only store them."""
    specs = at_rest(layout)
    kept = {*layout.tensor, *layout.expert}

    def use(name: str, array: jax.Array) -> jax.Array:
        owner = layout.expert if name.startswith("moe.") else layout.tensor
        dims = specs.get(name, ((),) * array.ndim)
        array = array.astype(dtype) if array.ndim > 1 else array
        return layout.constrain(array, *[axes if axes == owner and set(axes) <= kept else () for axes in dims])

    return {name: use(name, array) for name, array in layer.items()}


def shardings_at_rest(layout: Layout, shapes: dict[str, tuple[int, ...]]) -> dict[str, NamedSharding]:
    """The sharding of each weight at rest; weights of layers are stacked along a leading dim."""
    specs = at_rest(layout)

    def place(name: str, shape: tuple[int, ...]) -> NamedSharding:
        in_layers = "layers." in name
        short = name.split("layers.", 1)[1] if in_layers else name
        dims = specs.get(short, ((),) * (len(shape) - in_layers))
        return layout.sharding(*((), *dims) if in_layers else dims)

    return {name: place(name, shape) for name, shape in shapes.items()}
