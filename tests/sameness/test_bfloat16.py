"""Law 3 in bfloat16, on JAX: layouts differ from one device by no more than other orders of summation do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from shardwright.cli.typed.values import settings
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.reading import read_layout
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.files import parse_yaml
from shardwright.layouts import load_layout, preset_names
from shardwright.models import build
from tests.engine_jax.made_rows import LENGTH, tokens_of
from tests.engine_jax.steps import Run, assert_same_gradients, compile_plan, run_plan
from tests.matrix import rest, some
from tests.sameness.bounds import EVERY_EXPERT, Bound, assert_within, bounded
from tests.sameness.cases import DEEPSEEK3, LLAMA3, MIXTRAL

ROWS, VOCAB, SEED = 8, 256, 0
BATCHES = tuple(tokens_of(step, ROWS, VOCAB) for step in range(2))
SMALLEST = {
    LLAMA3: "num_layers=1,embed=32,num_heads=4,num_kv_heads=2,head_dim=8,mlp=32",
    MIXTRAL: "num_layers=1,embed=32,num_heads=4,num_kv_heads=4,head_dim=8,mlp=32",
    DEEPSEEK3: "num_layers=2,embed=32,q_lora=16,kv_lora=8,nope_dim=8,rope_dim=8,value_dim=8,mlp=32,expert_mlp=16",
}

OWN = {
    "uses apart": "{mesh: {x: 2, y: 2}, roles: {x: {elsewhere: idle, logits: fsdp}, y: fsdp}}",
    "heads and words": "{mesh: {x: 2, y: 2}, roles: {x: {elsewhere: tensor, sequence_parallel: true}, y: fsdp}}",
    "zero1": "{mesh: {x: 4}, roles: {x: {elsewhere: data, optimizer: shard}}}",
    "zero2": "{mesh: {x: 2, y: 2}, roles: {x: {elsewhere: data, optimizer: shard, gradients: shard}, y: fsdp}}",
    "all at once": "{mesh: {x: 2, y: 2, z: 2}, roles: {x: fsdp, y: context, z: {elsewhere: tensor}}}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``layout``: a preset or one of ``OWN``. ``options``: of the request."""

    model: str
    layout: str
    move: tuple[tuple[str, str], ...] = ()
    more: str = ""
    sizes: tuple[tuple[str, int], ...] = ()
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.model, self.layout, self.more, *(f"{k}={v}" for k, v in (*self.move, *self.options))])

    @property
    def alone(self) -> Case:
        """The same model with the same dtypes on one device."""
        dtypes = tuple((name, value) for name, value in self.options if name.endswith("_dtype"))
        return Case(model=self.model, layout="fsdp", more=self.more, sizes=(("fsdp", 1),), options=dtypes)


NARROW = (("weights_dtype", "bfloat16"), ("moments_dtype", "bfloat16,float32"))
MASTER = (*NARROW, ("master_dtype", "float32"))
SUMMED = (*MASTER, ("gradients_dtype", "float32"))
"""Narrow weights, and what a step adds to: these, or master weights, from gradients that are as narrow, or as wide."""

CASES = (
    Case(model=LLAMA3, layout="uses apart", more="tied=true"),
    Case(model=LLAMA3, layout="heads and words", more="tied=true", options=(("microbatches", 2),)),
    Case(model=LLAMA3, layout="all at once", move=(("move_attention", "ring"),)),
    Case(model=LLAMA3, layout="cp", move=(("move_attention", "ulysses"),), sizes=(("fsdp", 2), ("context", 2))),
    Case(model=MIXTRAL, layout="ep-as-cp", sizes=(("fsdp", 2), ("expert", 2))),
    Case(model=MIXTRAL, layout="tp-as-ep", move=(("move_moe", "ring"),), sizes=(("fsdp", 2), ("tensor", 2))),
    Case(model=DEEPSEEK3, layout="ep-as-cp", move=(("move_attention", "ring"),), sizes=(("fsdp", 1), ("expert", 4))),
    Case(model=LLAMA3, layout="zero1", options=SUMMED),
    Case(model=LLAMA3, layout="zero2", options=(*SUMMED, ("microbatches", 2))),
    Case(model=MIXTRAL, layout="ep", sizes=(("fsdp", 2), ("expert", 2)), options=MASTER),
    Case(model=DEEPSEEK3, layout="ep-as-cp", sizes=(("fsdp", 2), ("expert", 2)), options=MASTER),
)
"""Each movement of attention and of experts, `tensor` with a sharded residual stream, and a tied embedding, with one gather for both
uses and with one for each; master weights whose update is sharded, or whose layer has experts."""


def layout_of(name: str) -> Layout:
    return (
        load_layout(name) if name in preset_names() else read_layout(parse_yaml(OWN[name][:-1] + ", name: own}", name))
    )


def request_of(case: Case) -> Request:
    dimensions = ",".join(one for one in (SMALLEST[case.model], EVERY_EXPERT[case.model], case.more) if one)
    return Request(
        layout=replace(layout_of(case.layout), **dict(case.move)),  # pyright: ignore[reportArgumentType]
        table=build(case.model, {**settings([[dimensions]]), "vocab": str(VOCAB)}),
        mesh_sizes=dict(case.sizes),
        batch=ROWS,
        length=LENGTH,
        dtype="bfloat16",
        **dict(case.options),  # pyright: ignore[reportArgumentType]
    )


@cache
def one_device(alone: Case) -> tuple[Run, Run, Bound]:
    """A model on one device: its first steps on JAX and on PyTorch, and the bound of differences from these."""
    request = request_of(alone)
    return trained(make_plan(request)), *bounded(request, BATCHES, SEED)


@cache
def run_of(case: Case) -> Run:
    return trained(make_plan(request_of(case)))


def trained(plan: Plan) -> Run:
    assert not plan.errors, plan.errors
    return run_plan(plan, compile_plan(plan, level=0, xla_allow_excess_precision=False), BATCHES, SEED)


@pytest.mark.parametrize("case", some(CASES, (0, 1, 8)), ids=str)
def test_a_layout_is_the_same_as_one_device(case: Case) -> None:
    alone, _, bound = one_device(case.alone)
    assert_within(bound, run_of(case), alone)


AGAIN = Case(model=MIXTRAL, layout="tp-as-ep", move=(("move_moe", "ring"),), sizes=(("fsdp", 2), ("tensor", 2)))
LAST_BITS = 1e-6


@pytest.mark.parametrize("remat", [rest("dots"), "none"])
def test_recomputation_changes_nothing(remat: str) -> None:
    """Except for the last bits of float32, because XLA fuses other operations. It must not omit roundings, which it would between
    other operations here and there."""
    full, other = run_of(AGAIN), trained(make_plan(replace(request_of(AGAIN), remat=remat)))
    np.testing.assert_allclose(other.losses, full.losses, rtol=LAST_BITS)
    for ours, theirs in zip(other.gradients, full.gradients, strict=True):
        assert_same_gradients(ours, theirs, LAST_BITS)


ALONE = tuple(dict.fromkeys(case.alone for case in CASES))


OFTEN = {place for place, one in enumerate(ALONE) if one.model == LLAMA3 or (one.model == MIXTRAL and not one.options)}


@pytest.mark.parametrize("alone", some(ALONE, OFTEN), ids=str)
def test_an_engine_is_the_same_as_the_other(alone: Case) -> None:
    on_jax, on_torch, bound = one_device(alone)
    assert_within(bound, on_jax, on_torch)
