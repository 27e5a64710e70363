"""A computation that a device does, or waits for the others.

All devices of a stage take a branch together, and so all devices of each collective in it. But a permute is a collective of the entire
program. So a computation that permutes, as a ring of attention does, is divided at its permutes: a branch up to the first ones, another
one up to the next, and so on. All devices permute; those that wait send zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.extend.core.primitives import ppermute_p

from shardwright.core.pipeline.program import Share
from shardwright.engine_jax.io.scopes import of_branch

Out = TypeVar("Out")


def computed_or_waited(
    here: jax.Array,
    compute: Callable[[jax.Array], Out],
    wait: Callable[[jax.Array], Out],
    x: jax.Array,
    share: Share,
    *,
    permutes: bool,
) -> Out:
    """``compute(x)`` where ``here``, and else ``wait(x)``. ``permutes``: whether ``compute`` has permutes, which ``wait`` never has."""
    if permutes:
        return _divided(here, compute, wait, x, share)
    with of_branch(share):
        return jax.lax.cond(here, compute, wait, x)


@dataclass(frozen=True, slots=True)
class _Part:
    """``computed``: in a branch. ``permuted``: behind it, by all devices."""

    computed: Sequence[JaxprEqn]
    permuted: Sequence[JaxprEqn]

    @property
    def steps(self) -> Sequence[JaxprEqn]:
        return (*self.computed, *self.permuted)


def _divided(
    here: jax.Array, compute: Callable[[jax.Array], Out], wait: Callable[[jax.Array], Out], x: jax.Array, share: Share
) -> Out:
    closed, shapes = jax.make_jaxpr(compute, return_shape=True)(x)
    jaxpr = closed.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, x), strict=True))
    *parts, last = _parts(jaxpr)
    for number, part in enumerate(parts):
        behind = (*part.permuted, *(step for later in (*parts[number + 1 :], last) for step in later.steps))
        wanted = {*_read_by(behind), *_variables(jaxpr.outvars)}
        left = [one for step in part.computed for one in step.outvars if one in wanted]
        values |= zip(left, _in_a_branch(here, jaxpr, part.computed, left, values, share), strict=True)
        sent = [one for step in part.permuted for one in step.outvars]
        values |= zip(sent, _evaluated(jaxpr, part.permuted, sent, values), strict=True)

    def of_last(_: jax.Array) -> Out:
        found = _evaluated(jaxpr, last.computed, jaxpr.outvars, values)
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    with of_branch(share):
        return jax.lax.cond(here, of_last, wait, x)


def _in_a_branch(
    here: jax.Array,
    jaxpr: Jaxpr,
    steps: Sequence[JaxprEqn],
    wanted: Sequence[Var],
    values: Mapping[Var, Any],
    share: Share,
) -> Sequence[jax.Array]:
    """The values that are ``wanted``; zeros where the device waits."""

    def compute() -> Sequence[jax.Array]:
        return _evaluated(jaxpr, steps, wanted, values)

    shapes = jax.eval_shape(compute)
    with of_branch(share):
        return jax.lax.cond(here, compute, lambda: zeros_of(shapes))


def _parts(jaxpr: Jaxpr) -> Sequence[_Part]:
    """What no permute is before is computed where it is first used, so that little is kept from part to part; all else as soon as
    it can be."""
    steps = list(_needed(jaxpr))
    permutes_before: dict[Var, int] = {}

    def before(step: JaxprEqn) -> int:
        return max((permutes_before.get(one, 0) for one in _variables(step.invars)), default=0)

    for step in steps:
        permutes_before |= dict.fromkeys(step.outvars, before(step) + (step.primitive is ppermute_p))
    last = max(permutes_before.values(), default=0)
    first_use = dict.fromkeys(_variables(jaxpr.outvars), last)
    computed: list[list[JaxprEqn]] = [[] for _ in range(last + 1)]
    permuted: list[list[JaxprEqn]] = [[] for _ in range(last + 1)]
    for step in reversed(steps):
        number = before(step)
        if step.primitive is ppermute_p:
            permuted[number].append(step)
        else:
            number = number or min(first_use[one] for one in step.outvars if one in first_use)
            computed[number].append(step)
        for one in _variables(step.invars):
            first_use[one] = min(number, first_use.get(one, last))
    return [_Part(first[::-1], then[::-1]) for first, then in zip(computed, permuted, strict=True)]


def zeros_of(shapes: Any) -> Any:
    """Zeros of the shapes and dtypes of a tree."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _needed(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The steps on which a result depends. A layer that is computed again has others."""
    wanted, found = set(_variables(jaxpr.outvars)), []
    for step in reversed(jaxpr.eqns):
        if not wanted.isdisjoint(step.outvars):
            wanted |= _read_by([step])
            found.append(step)
    return reversed(found)


def _evaluated(
    jaxpr: Jaxpr, steps: Sequence[JaxprEqn], wanted: Sequence[Any], values: Mapping[Var, Any]
) -> Sequence[jax.Array]:
    """The values that are ``wanted``, of those that the steps compute and of those that are known."""
    made = {one for step in steps for one in step.outvars}
    read = {*_read_by(steps), *_variables(wanted)} - made
    given = [one for one in values if one in read]
    part = jaxpr.replace(constvars=[], invars=given, outvars=[*wanted], eqns=[*steps])
    return jaxpr_as_fun(ClosedJaxpr(part, []))(*(values[one] for one in given))


def _read_by(steps: Iterable[JaxprEqn]) -> set[Var]:
    return {one for step in steps for one in _variables(step.invars)}


def _variables(atoms: Iterable[Any]) -> Iterator[Var]:
    """Those that are no literals."""
    return (one for one in atoms if isinstance(one, Var))
