"""From a request to its quantized weights: what the recipe means for each of them under the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.table import Weight
from shardwright.core.quantization.amax import Extents, amax_key, num_amaxes, sharing_axes
from shardwright.core.quantization.freedom import Place, Step, freedom
from shardwright.core.quantization.links import Specs, copies, minor_dims
from shardwright.core.quantization.products import (
    inputs_and_outputs,
    of_operand,
    of_weight,
    quantized_layers,
    token_names,
)
from shardwright.core.quantization.quantized import QuantizedOperand, QuantizedWeight, ShardedDim
from shardwright.core.recipes.formats import bits_of
from shardwright.core.recipes.recipe import Dim, Operand, Product, Quantizer, Recipe
from shardwright.core.resolution.gradients import partial_gradient_axes
from shardwright.core.resolution.request import Request
from shardwright.core.resolution.resolve import activation_sizes, as_stored, expert_axes, operand_spec, resolve_weight
from shardwright.core.resolution.row_order import in_order


def quantized_weights(request: Request, mesh: Mesh) -> tuple[QuantizedWeight, ...]:
    """The weights whose products are quantized, in the order of the table; none without a recipe."""
    recipe = request.precision
    if recipe is None:
        return ()
    found = _Derivation(request, recipe, mesh)
    layers = ((weight, quantized_layers(weight, recipe, request.table)) for weight in request.table.weights)
    return tuple(found.of_weight(weight, num) for weight, num in layers if num)


class _Derivation:
    """What all weights of a request share."""

    def __init__(self, request: Request, recipe: Recipe, mesh: Mesh) -> None:
        self.request, self.recipe, self.mesh = request, recipe, mesh
        balanced = not in_order(request.layout, mesh, load_balanced=request.load_balanced)
        chunks = 2 * mesh.size(request.layout.axes_sharding("length", "input")) if balanced else 1
        around = request.layout.axes_sharding("length", "attention") if request.layout.move_attention == "ring" else ()
        self.step = Step(mesh=mesh, microbatches=request.microbatches, chunks=chunks, ring=mesh.size(around))
        sizes = dict(activation_sizes(request, mesh))
        self.sizes: Mapping[str, int] = {**sizes, "batch": ceil(request.batch / request.microbatches)}

    def of_weight(self, weight: Weight, num: int) -> QuantizedWeight:
        layout, mesh, recipe = self.request.layout, self.mesh, self.recipe
        stored = as_stored(self.request, weight)
        resolved = resolve_weight(stored, layout, mesh, self.request.engine)
        at_rest, in_use = (_of_one_layer(spec) for spec in (resolved.at_rest, resolved.in_use))
        operand = operand_spec(in_use, weight.component, layout, mesh)
        inputs, outputs = inputs_and_outputs(weight, self.request.engine)

        def dims_of(spec: Spec) -> dict[Dim, ShardedDim]:
            return {
                "inputs": of_weight(weight, inputs, spec, mesh),
                "outputs": of_weight(weight, outputs, spec, mesh),
            }

        tokens, input_dim = of_operand(weight, inputs, self.sizes, layout, mesh, self.request.table)
        _, output_dim = of_operand(weight, outputs, self.sizes, layout, mesh, self.request.table)
        specs = Specs(
            at_rest=mesh.sharding(at_rest),
            gathered=mesh.sharding(operand.without(axis for axis in operand.axes if axis not in at_rest.axes)),
            in_use=mesh.sharding(operand),
        )
        # Codes are made of shards at rest, whether they are gathered then or not.
        of_shards = recipe.rest_quantized or (recipe.gather_quantized and specs.are_gathered)
        dims: Mapping[Operand, dict[Dim, ShardedDim]] = {
            "weight": dims_of(at_rest if of_shards else operand),
            "input": {"tokens": tokens, "inputs": input_dim},
            "output_gradient": {"tokens": tokens, "outputs": output_dim},
        }
        partial = partial_gradient_axes(stored, layout, in_use)
        places: dict[tuple[Product, Operand], Place] = {
            (product, of): Place(
                product=product,
                operand=of,
                dims=dims[of],
                partial=self._partial(partial, (*tokens.axes, *output_dim.axes)) if of == "output_gradient" else (),
                scattering=self._scattering(weight, tokens) if of != "weight" else None,
            )
            for product, of in recipe.quantizers
        }
        experts = self._experts(weight, operand)
        ours = [n for n in at_rest.logical_axes if n != "experts"]
        agrees = mesh.in_mesh_order(axis for spec in (at_rest, operand) for n in ours for axis in spec.axes_of(n))
        codes, scales = self._bytes(dims_of(operand), experts)
        at_rest_experts = self._experts(weight, at_rest if of_shards else operand)
        scattered = [axis for axis in at_rest.axes_of("experts") if axis not in operand.axes] if of_shards else []
        operands = tuple(
            self._operand(
                weight,
                recipe.quantizers[at],
                place,
                at_rest_experts if at[1] == "weight" else experts,
                kept=experts,
                scattered=self.mesh.larger_than_one(scattered) if at[1] == "weight" else (),
            )
            for at, place in places.items()
        )
        all_experts = weight.size("experts") if "experts" in weight.logical_axes else 0
        found = QuantizedWeight(
            name=weight.name,
            component=weight.component,
            stack=weight.stack,
            num=num,
            inputs=inputs,
            outputs=outputs,
            agrees=mesh.larger_than_one(agrees),
            operands=operands,
            codes_bytes=codes,
            scales_bytes=scales,
            experts=weight.size("experts") if "experts" in weight.logical_axes else None,
            expert_axes=mesh.larger_than_one(operand.axes_of("experts")),
            minor_dims=minor_dims(specs, dims["weight"].values()) if of_shards else (),
            copies=copies(operands, specs, dims["weight"], all_experts, mesh) if of_shards else (),
            rests=recipe.rest_quantized,
        )
        chip = self.request.chip
        if chip is None:
            return found
        return replace(found, kernels=found.kernels_on(chip.device, self.request.engine, self.request.dtype))

    def _operand(
        self,
        weight: Weight,
        quantizer: Quantizer,
        place: Place,
        experts: int,
        kept: int,
        scattered: tuple[str, ...],
    ) -> QuantizedOperand:
        """``experts``: on a device where the operand is quantized; ``kept``: of which it keeps delayed amaxes, those that it computes.
        ``scattered``: the axes whose devices quantize other ones of these."""
        extents = quantizer.block.extents(place.product, place.operand)
        sharing = sharing_axes(quantizer, extents, place.dims, self.mesh)
        if quantizer.amax == "delayed":
            # What a run keeps is the same on all devices that hold the tensor, though each has a summand of it, or another expert's.
            sharing, experts = self.mesh.in_mesh_order((*sharing, *place.partial, *scattered)), kept
        reduced = sharing if self.recipe.reduce_amax else ()
        identity = (weight.name, place.operand)
        if place.operand == "input" and self._agreed_once(quantizer, place):
            # Weights of a layer that have the same input quantize it once.
            read = place.dims["inputs"].names
            identity = (str(weight.stack), weight.component, *token_names(weight), *read, "input")
        return QuantizedOperand(
            product=place.product,
            operand=place.operand,
            quantizer=quantizer,
            dims=place.dims,
            experts=experts,
            reduced=reduced,
            values=self._values(quantizer, extents, place, experts) if reduced else 0,
            same_amax=amax_key(identity, quantizer, extents),
            shards=self.step.shards(place.dims),
            freedom=freedom(self.recipe, quantizer, place, sharing, self.step),
        )

    def _values(self, quantizer: Quantizer, extents: Extents, place: Place, experts: int) -> int:
        found = experts * num_amaxes(quantizer, extents, place.dims, self.mesh)
        # No axis shards a partial operand, and its amax is reduced all the same.
        return max(found, experts) if quantizer.amax == "delayed" else found

    def _agreed_once(self, quantizer: Quantizer, place: Place) -> bool:
        """Whether weights that have one input agree on its amax once. The backward pass of each weight agrees on what only it
        quantizes, unless equal results are joined."""
        if self.request.properties.joins_equal_results:
            return True
        forward = self.recipe.quantizers.get(("output", "input"))
        if place.product == "output" or forward is None:
            return place.product == "output"
        extents = quantizer.block.extents(place.product, "input"), forward.block.extents("output", "input")
        return amax_key((), quantizer, extents[0]) == amax_key((), forward, extents[1])

    def _partial(self, partial: tuple[str, ...], sharding: tuple[str, ...]) -> tuple[str, ...]:
        """The axes over which an output gradient is partial: over them the weight's gradient is, and they shard no dim of it."""
        return tuple(axis for axis in self.mesh.larger_than_one(partial) if axis not in sharding)

    def _scattering(self, weight: Weight, tokens: ShardedDim) -> tuple[str, ...] | None:
        if "experts" not in weight.logical_axes:
            return None
        return self.mesh.in_mesh_order((*tokens.axes, *expert_axes(self.request.layout, self.mesh)))

    def _experts(self, weight: Weight, operand: Spec) -> int:
        if "experts" not in weight.logical_axes:
            return 1
        return ceil(weight.size("experts") / self.mesh.size(operand.axes_of("experts")))

    def _bytes(self, dims: Mapping[Dim, ShardedDim], experts: int) -> tuple[int, int]:
        """Codes and scales of a weight in use on a device. Products that quantize it in different ways have a copy each."""
        quantizers: dict[tuple[object, ...], tuple[Product, Quantizer]] = {}
        for (product, of), quantizer in self.recipe.quantizers.items():
            if of == "weight":
                extents = quantizer.block.extents(product, of)
                quantizers.setdefault((quantizer.dtype, *sorted(extents.items())), (product, quantizer))
        codes = scales = 0
        elements = experts * dims["inputs"].on_device(self.mesh) * dims["outputs"].on_device(self.mesh)
        for product, quantizer in quantizers.values():
            extents = quantizer.block.extents(product, "weight")
            number = experts
            for dim, extent in extents.items():
                number *= 1 if extent is None else ceil(dims[dim].on_device(self.mesh) / extent)
            codes += ceil(elements * bits_of(quantizer.dtype) / 8)
            scales += ceil(number * bits_of(quantizer.scale.dtype) / 8) + (
                4 * experts if quantizer.scale.of_tensor else 0
            )
        return codes, scales


def _of_one_layer(spec: Spec) -> Spec:
    """The spec without the dim of stacked layers, which stages shard."""
    return Spec(spec.dims[1:]) if spec.logical_axes[0] == "layers" else spec
