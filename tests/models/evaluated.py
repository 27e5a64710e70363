"""A program computed step by step in JAX, on one device, or on several along one axis that shards what it is given.

On several devices each holds its shards, and computes its loss; what a ``Take`` sums, forward and backward, is what was derived. Nothing
else of the derivation is used, so a gradient that is not that of one device shows that a sum is missing, or is one too many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.core.program.dims import LETTERS
from shardwright.core.program.primitives import (
    Add,
    Attend,
    Bias,
    Cap,
    Combine,
    Dispatch,
    Embed,
    Gate,
    Join,
    Loss,
    Norm,
    Product,
    Rotate,
    Route,
    Scale,
    Split,
    Take,
)
from shardwright.core.program.program import Program, Step, Value, WeightUse
from shardwright.core.program.sums import ProgramSums

Arrays = Mapping[str, Any]
AXIS = "devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """One axis of ``num`` devices, and the logical axes that it shards in each component."""

    num: int
    axes: Mapping[str, frozenset[str]]

    def dims(self, component: str, logical_axes: tuple[str, ...]) -> list[int]:
        """The numbers of the dims that it shards."""
        return [n for n, axis in enumerate(logical_axes) if axis in self.axes.get(component, frozenset())]

    def sums(self, contracted: tuple[tuple[str, str], ...]) -> bool:
        """Whether a sum over these dims is one over its devices."""
        return any(axis in self.axes.get(component, frozenset()) for component, axis in contracted)


ALONE = Sharding(num=1, axes={})


def local(array: Any, dims: list[int], sharding: Sharding) -> list[Any]:
    """The shard of each device."""
    shards = [array] * sharding.num
    for dim in dims:
        shards = [np.array_split(np.asarray(array), sharding.num, dim)[n] for n in range(sharding.num)]
    return shards


@jax.numpy_rank_promotion("allow")
def computed(
    program: Program, params: Arrays, batch: Arrays, sums: ProgramSums | None = None, sharding: Sharding = ALONE
) -> tuple[Any, Any]:
    """The loss and the logits of a device."""
    values: dict[Value, Any] = {value: jnp.asarray(batch[value.name]) for value in program.fields}
    scores: Any = None
    for name, of_stack in groupby(program.steps, key=lambda step: step.stack):
        steps, stack = list(of_stack), program.stack(name)
        for number in range(stack.num if stack else 1):
            if stack and number:
                values[stack.input] = values[stack.output]
            for step in steps:
                if isinstance(step.does, Loss):
                    scores = values[step.inputs[0]]
                weights = [_weight(params, use, name, number) for use in step.weights]
                for value, array in zip(step.outputs, _made(step, values, weights, sums, sharding), strict=True):
                    values[value] = array
    return values[program.steps[-1].output], scores


def _weight(params: Arrays, use: WeightUse, stack: str | None, number: int) -> Any:
    return params[use.name] if stack is None else params[f"{stack}.{use.name}"][number]


def _made(
    step: Step, values: Mapping[Value, Any], weights: list[Any], sums: ProgramSums | None, sharding: Sharding
) -> list[Any]:
    xs = [values[value] for value in step.inputs]
    match step.does:
        case Product(dims=dims):
            spec = f"{''.join(dims.input)},{''.join(dims.weight)}->{''.join(dims.output)}"
            return [jnp.einsum(spec, xs[0], weights[0], precision="highest")]
        case Norm(eps=eps):
            return [xs[0] / jnp.sqrt(jnp.mean(xs[0] ** 2, -1, keepdims=True) + eps) * weights[0]]
        case Bias(dims=dims):
            shape = [n if dim in dims else 1 for dim, n in zip(step.inputs[0].dims, xs[0].shape, strict=True)]
            return [xs[0] + weights[0].reshape(shape)]
        case Rotate(rope=rope):
            return [_rotated(xs[0], xs[1], rope)]
        case Gate():
            return [jax.nn.silu(xs[0]) * xs[1]]
        case Attend(scale=scale, window=window):
            return [_attended(*xs, scale=scale, window=window)]
        case Route():
            return _routed(step.does, xs[0], xs[1], weights)
        case Dispatch():
            return [jnp.broadcast_to(xs[0][..., None, :], (*xs[1].shape, xs[0].shape[-1]))]
        case Combine():
            return [jnp.einsum("BGUAM,BGUA->BGUM", xs[0], xs[1])]
        case Embed():
            own = xs[0] - (jax.lax.axis_index(AXIS) * weights[0].shape[0] if _shards(step, "V", sharding) else 0)
            return [jax.nn.one_hot(own, weights[0].shape[0]) @ weights[0]]
        case Loss():
            scores = _whole(xs[0], step.inputs[0], sharding, dims="V")
            picked = jnp.sum(jax.nn.one_hot(xs[1], scores.shape[-1]) * jax.nn.log_softmax(scores), -1)
            return [-jnp.sum(jnp.where(xs[2], picked, 0))]
        case Add():
            return [sum(xs[1:], xs[0])]
        case Scale(factor=factor):
            return [xs[0] * factor]
        case Cap(limit=limit):
            return [limit * jnp.tanh(xs[0] / limit)]
        case Split(widths=widths):
            return jnp.split(xs[0], np.cumsum(widths)[:-1].tolist(), -1)
        case Join():
            most = max((x.shape for x in xs), key=len)[:-1]
            return [jnp.concatenate([_for_all_heads(x, most) for x in xs], -1)]
        case Take():
            return [_taken(step, xs[0], values, sums, sharding)]


def _rotated(x: Any, positions: Any, rope: Any) -> Any:
    frequencies = jnp.asarray(rope.inverse_frequencies(x.shape[-1]))
    angles = positions.reshape(*positions.shape, *[1] * (x.ndim - positions.ndim)) * frequencies
    turns = rope.amplitude * jnp.exp(1j * angles)
    pairs = x[..., 0::2] + 1j * x[..., 1::2] if rope.interleaved else jax.lax.complex(*jnp.split(x, 2, -1))
    turned = pairs * turns
    if rope.interleaved:
        return jnp.stack([turned.real, turned.imag], -1).reshape(x.shape)
    return jnp.concatenate([turned.real, turned.imag], -1)


def _attended(q: Any, k: Any, v: Any, *masks: Any, scale: float, window: int | None) -> Any:
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    at, documents, k_at, k_documents = masks
    distance = at[:, :, None] - k_at[:, None]
    sees = (distance >= 0) & (documents[:, :, None] == k_documents[:, None])
    if window is not None:
        sees &= distance < window
    scores = jnp.einsum("BTHD,BSHD->BHTS", q, k, precision="highest") * scale
    shares = jax.nn.softmax(jnp.where(sees[:, None], scores, -1e30))
    return jnp.einsum("BHTS,BSHE->BTHE", shares, v, precision="highest")


def _routed(does: Route, scores: Any, valid: Any, weights: list[Any]) -> list[Any]:
    shares = jax.nn.sigmoid(scores) if does.scoring == "sigmoid" else jax.nn.softmax(scores)
    ranked = shares + weights[0] if weights else shares
    if does.num_groups > 1:
        groups = ranked.reshape(*ranked.shape[:-1], does.num_groups, -1)
        best = jax.lax.top_k(groups, 2 if does.scoring == "sigmoid" else 1)[0].sum(-1)
        _, chosen = jax.lax.top_k(best, does.chosen_groups)
        is_chosen = jax.nn.one_hot(chosen, does.num_groups).sum(-2) > 0
        ranked = jnp.where(is_chosen[..., None], groups, -jnp.inf).reshape(ranked.shape)
    _, experts = jax.lax.top_k(ranked, does.top_k)
    picked = jnp.take_along_axis(shares, experts, -1)
    if does.normalized:
        picked = picked / picked.sum(-1, keepdims=True)
    # No expert has the tokens of padding.
    return [jnp.where((valid != 0)[..., None], experts, scores.shape[-1]), picked * does.scale]


def _for_all_heads(x: Any, most: tuple[int, ...]) -> Any:
    return x if x.shape[:-1] == most else jnp.broadcast_to(x[..., None, :], (*most, x.shape[-1]))


def _taken(step: Step, x: Any, values: Mapping[Value, Any], sums: ProgramSums | None, sharding: Sharding) -> Any:
    (source,), target = step.inputs, step.output
    chosen, num = _experts_of(step, values, sharding)

    def convert(x: Any, chosen: Any) -> Any:
        return _changed(step, x, chosen, num, sharding)

    if sums is None:
        return convert(x, chosen)
    summed, fed = sharding.sums(sums.summed(step)), sharding.sums(sums.fed(step))
    before, after = (sharding.dims(value.component, value.logical_axes) for value in (source, target))

    def forward(x: Any, chosen: Any) -> Any:
        x = jax.lax.psum(x, AXIS) if summed else x
        return _sharded(convert(_gathered(x, before), chosen), after, sharding)

    if not source.is_float:
        return forward(x, chosen)
    whole = jax.eval_shape(lambda x: _gathered(x, before), x)

    @jax.custom_vjp
    def move(x: Any, chosen: Any) -> Any:
        return forward(x, chosen)

    def backward(chosen: Any, cotangent: Any) -> tuple[Any, Any]:
        cotangent = jax.lax.psum(cotangent, AXIS) if fed else cotangent
        transposed = jax.linear_transpose(lambda x: convert(x, chosen), whole)
        (cotangent,) = transposed(_gathered(cotangent, after))
        return _sharded(cotangent, before, sharding), np.zeros(chosen.shape, jax.dtypes.float0)

    move.defvjp(lambda x, chosen: (forward(x, chosen), chosen), backward)
    return move(x, chosen)


def _changed(step: Step, x: Any, chosen: Any, num: int, sharding: Sharding) -> Any:
    """From the dims of a take's input to those of its output, all shards together. ``chosen``: experts of tokens, of ``num``."""
    assert isinstance(step.does, Take)
    source, target = step.inputs[0].dims, step.output.dims
    if step.does.kind in ("dispatch", "combine"):
        is_of = jax.nn.one_hot(chosen, num, axis=0)
        _, B, G, U, A = is_of.shape
        if step.does.kind == "dispatch":
            return (is_of[..., None] * x[None]).reshape(num, B, G, U * A, -1)
        return (is_of[..., None] * x.reshape(num, B, G, U, A, -1)).sum(0)
    if "G" in target and "G" not in source:
        return x.reshape(x.shape[0], sharding.num, -1, *x.shape[2:])
    if "G" in source and "G" not in target:
        return x.reshape(x.shape[0], -1, *x.shape[3:])
    return x


def _experts_of(step: Step, values: Mapping[Value, Any], sharding: Sharding) -> tuple[Any, int]:
    """The experts of all tokens, where a take is of their rows, and how many experts there are."""
    if not isinstance(step.does, Take) or step.does.kind not in ("dispatch", "combine"):
        return jnp.zeros((), jnp.int32), 0
    experts = [value for value in values if value.dims == ("B", "G", "U", "A") and not value.is_float][-1]
    (scores, *_) = [value for value in values if value.dims == ("B", "L", "Z")]
    dims = sharding.dims(experts.component, experts.logical_axes)
    return _gathered(values[experts], dims), values[scores].shape[-1]


def _gathered(x: Any, dims: list[int]) -> Any:
    for dim in dims:
        x = jax.lax.all_gather(x, AXIS, axis=dim, tiled=True)
    return x


def _sharded(x: Any, dims: list[int], sharding: Sharding) -> Any:
    for dim in dims:
        size = x.shape[dim] // sharding.num
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * size, size, dim)
    return x


def _whole(x: Any, value: Value, sharding: Sharding, dims: str) -> Any:
    """A value with all shards of a dim on each device, each of which has all of its cotangent."""
    numbers = [n for n in sharding.dims(value.component, value.logical_axes) if value.dims[n] in dims]
    if not numbers:
        return x

    @jax.custom_vjp
    def whole(x: Any) -> Any:
        return _gathered(x, numbers)

    whole.defvjp(lambda x: (_gathered(x, numbers), None), lambda _, c: (_sharded(c, numbers, sharding),))
    return whole(x)


def _shards(step: Step, dim: str, sharding: Sharding) -> bool:
    return LETTERS[dim] in sharding.axes.get(step.output.component, frozenset())
