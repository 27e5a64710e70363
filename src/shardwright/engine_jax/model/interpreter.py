"""The operations of a walk, one after the other: each calls its primitive, is resharded as planned, and gets its name.

B rows, T tokens of queries, S tokens of keys, H heads, K KV heads, D head dim, E value dim. All are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from shardwright.core.program.primitives import (
    Add,
    Bias,
    Cap,
    Embed,
    Gate,
    Join,
    Norm,
    Product,
    Rotate,
    Route,
    Scale,
    Split,
    Take,
)
from shardwright.core.program.program import Step, Value
from shardwright.core.program.walk import AttentionGroup, ExpertGroup, Operation, Walk
from shardwright.engine_jax.attention.attend import attend, attend_around_ring, in_kernel_order, own_heads, own_kv_heads
from shardwright.engine_jax.experts.experts import MoeCounts, through_experts
from shardwright.engine_jax.experts.grouped_blocks import Matrices
from shardwright.engine_jax.experts.route import route
from shardwright.engine_jax.io.layer_io import InUse, Links
from shardwright.engine_jax.io.scopes import of_component
from shardwright.engine_jax.layers.elementwise import added, capped, joined, split, with_bias
from shardwright.engine_jax.layers.embedding import embed
from shardwright.engine_jax.layers.gate import hidden_units
from shardwright.engine_jax.layers.norm import rms_norm
from shardwright.engine_jax.layers.product import NONE_AGREED, weight_product, wide_product
from shardwright.engine_jax.layers.rotate import rotate
from shardwright.engine_jax.precision.delayed import several
from shardwright.engine_jax.precision.operands import Amaxes, input_amaxes

Values = dict[Value, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """Of a layer or an end. ``weights``: its own, in use, by their names in it. ``prepared``: what is made once a step, in the order of
    ``walk.prepared``. ``links``: its own, with the low precision of its products."""

    walk: Walk
    weights: InUse
    prepared: Sequence[Any]
    links: Links

    def run(
        self, operations: Sequence[Operation], given: Mapping[Value, Any]
    ) -> tuple[Mapping[Value, Any], MoeCounts | None]:
        """The values that are ``given`` and those that the operations make, and what experts count."""
        values, counts, amaxes = dict(given), None, dict[Value, Amaxes]()
        for operation in operations:
            match operation:
                case ExpertGroup():
                    values[operation.output], counts = self._through_experts(operation, values)
                case AttentionGroup():
                    with of_component(operation.output.component):
                        values[operation.output] = self._attended(operation, values)
                case Step(does=Take()):
                    values[operation.output] = self.taken(operation, values[operation.inputs[0]])
                case Step():
                    with of_component(operation.outputs[0].component):
                        results = self._results(operation, [values.get(value) for value in operation.inputs], amaxes)
                    values.update(zip(operation.outputs, results, strict=True))
                case _:
                    raise AssertionError(operation)
        return values, counts

    def taken(self, take: Step, x: jax.Array) -> jax.Array:
        return self.links.move(take.inputs[0].row, take.output.row, x)

    def _results(self, step: Step, xs: Sequence[Any], amaxes: dict[Value, Amaxes]) -> Sequence[jax.Array]:
        weights = [self.weights[weight.name] for weight in step.weights]
        match step.does:
            case Product():
                result = self._product(step, xs[0], weights[0], amaxes)
            case Norm(eps=eps):
                result = rms_norm(xs[0], weights[0], eps)
            case Rotate(rope=rope):
                result = rotate(xs[0], self._prepared(step), rope.interleaved)
            case Gate():
                result = hidden_units(xs[0], xs[1])
            case Route():
                # It names the experts of all tokens, and returns those of the tokens that are routed.
                names = (step.outputs[0].name, step.outputs[1].name)
                return route(xs[0], self._prepared(step), weights[0] if weights else None, step.does, names)
            case Embed():
                result = embed(xs[0], weights[0], self.links.vocab.get(step.output.component, ()))
            case Add():
                result = added(*xs)
            case Bias(dims=dims):
                result = with_bias(xs[0], weights[0], [step.inputs[0].dims.index(dim) for dim in dims])
            case Scale(factor=factor):
                result = xs[0] * factor
            case Cap(limit=limit):
                result = capped(xs[0], limit)
            case Split(widths=widths):
                return split(xs[0], widths)
            case Join():
                result = joined(xs)
            case _:
                raise AssertionError(step)
        return [checkpoint_name(result, step.output.name) if step.output in self.walk.named else result]

    def _product(self, step: Step, x: jax.Array, weight: Any, amaxes: dict[Value, Amaxes]) -> jax.Array:
        assert isinstance(step.does, Product)
        (use,), dims = step.weights, step.does.dims.einsum
        if use.in_use_dtype is not None:
            return wide_product(dims, x, weight)
        together = self.walk.weights_of_input(step)
        if step.inputs[0] not in amaxes:
            low = [self.links.low.get(name) for name in together]
            amaxes[step.inputs[0]] = input_amaxes(x, low) if len(together) > 1 else NONE_AGREED
        low, dtype = self.links.low.get(use.name), step.output.dtype
        return weight_product(dims, x, weight, low, amaxes[step.inputs[0]], dtype)

    def _attended(self, group: AttentionGroup, values: Values) -> jax.Array:
        links, q_BTHD = self.links.attention, values[group.queries]
        num_heads = q_BTHD.shape[2]
        of_shards = self._of_shards(group, num_heads)

        def keys_and_values(held: tuple[jax.Array, ...], shard: int = 0) -> tuple[jax.Array, jax.Array]:
            taken = zip((take.output for take in group.takes), held, strict=True)
            made, _ = of_shards[shard].run(group.between, {**values, **dict(taken)})
            k_BSKD, v_BSKE = made[group.keys], made[group.values]
            if group.shares_heads:
                return own_kv_heads(k_BSKD, num_heads, links), own_kv_heads(v_BSKE, num_heads, links)
            return k_BSKD, v_BSKE

        mask, scale = self._prepared(group.attend), group.scale
        sources = tuple(values[take.inputs[0]] for take in group.takes)
        if links.ring is not None:
            names = tuple(take.output.name for take in group.takes)
            return attend_around_ring(q_BTHD, sources, names, keys_and_values, mask, scale, links)
        taken = (self.taken(take, x) for take, x in zip(group.takes, sources, strict=True))
        held = tuple(in_kernel_order(x, links) for x in taken)
        return attend(q_BTHD, *keys_and_values(held), mask, scale, links)

    def _of_shards(self, group: AttentionGroup, num_heads: int) -> Sequence[Interpreter]:
        """For each shard of a ring, or for all keys: the weights for this device's query heads, and their low precision, which each
        product with one weight has of its own."""
        ring, uses = self.links.attention.ring, [use for step in group.between for use in step.weights]
        shards = 1 if ring is None else len(ring.numbers)
        by_heads = {use.name for use in uses if use.logical_axes[1:2] == ("heads",)}
        own = {name: own_heads(self.weights[name], num_heads, self.links.attention) for name in by_heads}
        low = {use.name: several(self.links.low.get(use.name), shards) for use in uses}
        return [
            replace(
                self,
                weights={**self.weights, **own},
                links=replace(
                    self.links,
                    low={
                        **self.links.low,
                        **{name: one for name, of_shards in low.items() if (one := of_shards[shard]) is not None},
                    },
                ),
            )
            for shard in range(shards)
        ]

    def _through_experts(self, group: ExpertGroup, values: Values) -> tuple[jax.Array, MoeCounts]:
        assert self.links.experts is not None
        matrices = Matrices(*(self.weights[product.weights[0].name] for product in group.products))
        tokens, experts, weights = (values[value] for value in (group.tokens, group.experts, group.weights))
        return through_experts(tokens, experts, weights, matrices, group, self.links.experts, self.links.low)

    def _prepared(self, step: Step) -> Any:
        place = self.walk.prepared_at(step)
        assert place is not None, step
        return self.prepared[place]
