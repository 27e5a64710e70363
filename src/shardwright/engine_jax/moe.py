"""A layer of experts: tokens to slots, experts, slots back to tokens. Everything moves by index, in static shapes.

B rows, L tokens, M embed, K experts of a token, E experts, F hidden units; G groups (pieces of a row that are
dispatched together) of T tokens; P slots per group and expert, C = E * P slots of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.core.capacity import num_slots, row_capacity
from shardwright.engine_jax.layer_io import Params, Place
from shardwright.engine_jax.routing import route
from shardwright.models.parts.architecture import Experts


class Assignment(NamedTuple):
    """Where each choice of a token went, and which choice each slot holds: two views of one matching.

    A choice is a token with one of its experts, numbered ``token * K + which``. ``slot_BGTK`` is C for a choice that
    was dropped, ``choice_BGC`` is T * K for a slot that is empty. ``counts_E``: tokens that chose each expert.
    """

    slot_BGTK: jax.Array
    choice_BGC: jax.Array
    counts_E: jax.Array


def capacity_of(experts: Experts, length: int) -> int | None:
    """Tokens of one row that one expert takes at most; None where none is dropped."""
    return row_capacity(experts.capacity_factor, top_k=experts.top_k, experts=experts.num, length=length)


def assign(experts_BLK: jax.Array, valid_BL: jax.Array, experts: Experts, groups: int) -> Assignment:
    """Give each choice a slot of its expert, in the order of the tokens. Padding gets none.

    A choice is dropped by its place in the whole row, so that no grouping changes what is dropped.
    """
    B, L, K = experts_BLK.shape
    E, T, capacity = experts.num, L // groups, capacity_of(experts, L)
    P = num_slots(T, capacity)
    assert groups * T == L, (groups, L)
    experts_BGTK = experts_BLK.reshape(B, groups, T, K)
    chosen_BGTKE = (experts_BGTK[..., None] == jnp.arange(E)[None, None, None, None]) & valid_BL.reshape(
        B, groups, T, 1, 1
    )
    chosen_BGTE = jnp.sum(chosen_BGTKE, axis=3, dtype=jnp.int32)
    of_group_BGE = jnp.sum(chosen_BGTE, axis=2)
    before_BGTE = jnp.cumsum(chosen_BGTE, axis=2) - chosen_BGTE
    place_BGTK = jnp.take_along_axis(before_BGTE, experts_BGTK, axis=-1)
    kept_BGTK = jnp.broadcast_to(valid_BL.reshape(B, groups, T, 1), place_BGTK.shape)
    if capacity is not None:
        earlier_BGE = jnp.cumsum(of_group_BGE, axis=1) - of_group_BGE
        earlier_BGTE = jnp.broadcast_to(earlier_BGE[:, :, None], before_BGTE.shape)
        place_in_row = place_BGTK + jnp.take_along_axis(earlier_BGTE, experts_BGTK, axis=-1)
        kept_BGTK = kept_BGTK & (place_in_row < capacity)
    slot_BGTK = jnp.where(kept_BGTK, experts_BGTK * P + place_BGTK, E * P)
    choice_BGC = jax.vmap(jax.vmap(lambda slot_N: _inverse(slot_N, E * P)))(slot_BGTK.reshape(B, groups, T * K))
    return Assignment(slot_BGTK, choice_BGC, jnp.sum(of_group_BGE, axis=(0, 1)))


@jax.custom_vjp
def to_slots(x_BGTM: jax.Array, assignment: Assignment) -> jax.Array:
    """The token of each slot, BGCM; zeros where a slot is empty.

    Its transpose is a gather too (a token's gradient is the sum over its slots), so neither direction scatters,
    and both cut along B and G without a collective.
    """
    num_choices = assignment.slot_BGTK.shape[-1]
    return _rows(x_BGTM, assignment.choice_BGC // num_choices)


@jax.custom_vjp
def from_slots(y_BGCM: jax.Array, assignment: Assignment) -> jax.Array:
    """What the slots of each choice hold, BGTKM; zeros where it was dropped. The transpose of copying to slots."""
    slot_BGTK = assignment.slot_BGTK
    rows = _rows(y_BGCM, slot_BGTK.reshape(*slot_BGTK.shape[:2], -1))
    return rows.reshape(*slot_BGTK.shape, y_BGCM.shape[-1])


def experts_layer(
    x_BLM: jax.Array, valid_BL: jax.Array, weights: Params, experts: Experts, groups: int, place: Place
) -> tuple[jax.Array, jax.Array]:
    """What the routed experts add to the residual stream, BLM, and the tokens each expert was chosen by, E.

    ``groups`` is the layout's: the number of pieces that its axes cut a row into on the token side. It moves
    work, not results.
    """
    B, L, M = x_BLM.shape
    T, P = L // groups, num_slots(L // groups, capacity_of(experts, L))
    x_BLM = place("router.input", x_BLM)
    routing = route(x_BLM, weights["router.kernel"], weights.get("router.bias"), experts, place)
    assignment = assign(routing.experts_BLK, valid_BL, experts, groups)

    x_BGTM = place("router.grouped", x_BLM.reshape(B, groups, T, M))
    slots_BGCM = to_slots(x_BGTM, assignment)
    slots_BGEPM = place("router.dispatched", slots_BGCM.reshape(B, groups, experts.num, P, M))
    x_EBGPM = place("moe.dispatched", slots_BGEPM.transpose(2, 0, 1, 3, 4))
    gate_EBGPF = jnp.einsum("EBGPM,EMF->EBGPF", x_EBGPM, weights["moe.gate"])
    up_EBGPF = jnp.einsum("EBGPM,EMF->EBGPF", x_EBGPM, weights["moe.up"])
    hidden_EBGPF = place("moe.hidden", jax.nn.silu(gate_EBGPF) * up_EBGPF)
    y_EBGPM = place("moe.output", jnp.einsum("EBGPF,EFM->EBGPM", hidden_EBGPF, weights["moe.down"]))
    y_BGEPM = place("router.returned", y_EBGPM.transpose(1, 2, 0, 3, 4))

    returned_BGTKM = from_slots(y_BGEPM.reshape(B, groups, experts.num * P, M), assignment)
    weights_BGTK = routing.weights_BLK.reshape(B, groups, T, experts.top_k)
    out_BGTM = jnp.einsum("BGTKM,BGTK->BGTM", returned_BGTKM, weights_BGTK, preferred_element_type=jnp.float32)
    out_BGTM = place("router.combined", out_BGTM.astype(x_BLM.dtype))
    return place("router.output", out_BGTM.reshape(B, L, M)), assignment.counts_E


def _inverse(slot_N: jax.Array, num: int) -> jax.Array:
    """For each of ``num`` slots the index that points to it, and N where none does."""
    N = slot_N.shape[0]
    return jnp.full(num, N, jnp.int32).at[slot_N].set(jnp.arange(N, dtype=jnp.int32), mode="drop")


def _rows(x_BGNM: jax.Array, index_BGI: jax.Array) -> jax.Array:
    """Rows of ``x`` by index within each row and group, BGIM; zeros for an index past the end."""
    return jax.vmap(jax.vmap(lambda x, index: x.at[index].get(mode="fill", fill_value=0)))(x_BGNM, index_BGI)


def _no_gradient(assignment: Assignment) -> Assignment:
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0), assignment)


def _to_slots_forward(x_BGTM, assignment):
    return to_slots(x_BGTM, assignment), assignment


def _to_slots_backward(assignment, d_BGCM):
    return jnp.sum(from_slots(d_BGCM, assignment), axis=3), _no_gradient(assignment)


def _from_slots_forward(y_BGCM, assignment):
    return from_slots(y_BGCM, assignment), assignment


def _from_slots_backward(assignment, d_BGTKM):
    B, G, T, K, M = d_BGTKM.shape
    return _rows(d_BGTKM.reshape(B, G, T * K, M), assignment.choice_BGC), _no_gradient(assignment)


to_slots.defvjp(_to_slots_forward, _to_slots_backward)
from_slots.defvjp(_from_slots_forward, _from_slots_backward)
