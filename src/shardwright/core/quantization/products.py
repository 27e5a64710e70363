"""Which weights are quantized, and the dims of their products on the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from shardwright.core.engines.engines import ENGINES, Engine
from shardwright.core.findings.patterns import matches
from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.table import EXPERT_TOKENS, ModelTable, Weight
from shardwright.core.quantization.quantized import ShardedDim
from shardwright.core.recipes.recipe import QUANTIZED, Recipe
from shardwright.core.resolution.resolve import resolve_activation

RESIDUAL_SIDE = ("embed", "q_lora", "kv_lora")
"""The dims by which a user's own weight of more than two dims shows on which side its inputs are, as the storage dims do."""


def is_product(weight: Weight) -> bool:
    """Whether tokens are multiplied with a weight: no norm, no table of embeddings, and no buffer."""
    names = _names(weight)
    # A tied weight is the embedding's, also where it is the logits' stage that has it.
    looked_up = "embedding" in (weight.component, weight.name.partition(".")[0])
    return len(names) > 1 and not weight.frozen and not looked_up and not any(name.startswith("_") for name in names)


def quantized_layers(weight: Weight, recipe: Recipe, table: ModelTable) -> int:
    """In how many of its layers a weight is quantized; 0 where its products stay in the computation's dtype."""
    wanted = weight.component in QUANTIZED or any(matches(weight.name, pattern) for pattern in recipe.quantized)
    if not wanted or not is_product(weight) or any(matches(weight.name, pattern) for pattern in recipe.high):
        return 0
    if weight.stack is None:
        return weight.num
    return max(0, min(weight.num, table.num_layers - recipe.high_layers - weight.first_layer))


def layer_runs(num: int, quantized: Iterable[int]) -> tuple[range, ...]:
    """The runs of consecutive layers of a stack of ``num`` in which the same weights are quantized; ``quantized``: in how many first
    layers each of its weights is. JAX scans over each run.

    >>> layer_runs(32, [28, 28]), layer_runs(32, [32]), layer_runs(2, [])
    ((range(0, 28), range(28, 32)), (range(0, 32),), (range(0, 2),))
    """
    return tuple(range(start, stop) for start, stop in pairwise(sorted({0, num, *quantized})))


def inputs_and_outputs(weight: Weight, engine: Engine) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The logical axes that are contracted in a weight's output, and those that it has.

    Our tables say what PyTorch stores, which is outputs first. A user's own weight is (outputs, inputs) or (inputs,
    outputs), as the engine says; of more than two dims, those of the residual stream or of a latent are one side.
    """
    names = _names(weight)
    if weight.torch_dims is not None:
        outputs, inputs = (dim for dim in weight.torch_dims if dim != ("experts",))
        return inputs, outputs
    if ENGINES[engine].outputs_first:
        return names[-1:], names[:-1]
    if names[0] not in RESIDUAL_SIDE and names[-1] in RESIDUAL_SIDE:
        return names[:-1], names[-1:]
    return names[:1], names[1:]


def of_weight(weight: Weight, names: tuple[str, ...], spec: Spec, mesh: Mesh) -> ShardedDim:
    """Merged dims of a weight under a spec, in which PyTorch's merged dims have the name of the first."""
    return ShardedDim(
        names=names,
        sizes=tuple(weight.size(name) for name in names),
        sharding=tuple(mesh.larger_than_one(spec.axes_of(name)) for name in names),
    )


def token_names(weight: Weight) -> tuple[str, ...]:
    """The dims of the tokens that are multiplied with a weight."""
    return EXPERT_TOKENS if "experts" in weight.logical_axes else weight.tokens


def of_operand(
    weight: Weight, names: tuple[str, ...], sizes: Mapping[str, int], layout: Layout, mesh: Mesh, table: ModelTable
) -> tuple[ShardedDim, ShardedDim]:
    """The tokens of an input or of an output gradient, and its other dims, as they are multiplied.

    ``sizes``: of the dims of tokens in a microbatch.
    """
    tokens = token_names(weight)
    experts = tuple(name for name in weight.logical_axes if name == "experts")
    spec = resolve_activation(weight.component, (*experts, *tokens, *names), layout, mesh, table.components)

    def dim(of: tuple[str, ...], size_of: Mapping[str, int]) -> ShardedDim:
        return ShardedDim(
            names=of,
            sizes=tuple(size_of[name] for name in of),
            sharding=tuple(mesh.larger_than_one(spec.axes_of(name)) for name in of),
        )

    return dim(tokens, sizes), dim(names, {name: weight.size(name) for name in names})


def _names(weight: Weight) -> tuple[str, ...]:
    return tuple(name for name in weight.logical_axes if name != "experts")
