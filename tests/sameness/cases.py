"""The layouts under which every family is trained and compared with one device.

``COVERING`` are part of every run of the tests: each preset, each movement, each family under several layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from shardwright.cli.typed.values import mesh_sizes
from shardwright.layouts import preset_names
from tests.engine_jax.steps import Case, layout_of

LLAMA3, MIXTRAL, DEEPSEEK3 = MODELS = ("llama3-test", "mixtral-test", "deepseek3-test")
SHARED_HEADS = "num_kv_heads=4"
MICROBATCHES = 2
ROWS, FEW_ROWS = 8, 4
"""Rows of a step: the usual number, which ``case`` raises to one row per device and microbatch; and fewer rows than devices."""

UNTRAINED = {"pp": "stages have cases of their own, below"}

MESHES = {
    "ddp": ("data=8", "data=4"),
    "fsdp": ("fsdp=8", "fsdp=4"),
    "hsdp": ("data=4,fsdp=2", "data=2,fsdp=4"),
    "tp": ("data=2,tensor=4", "tensor=4"),
    "fsdp-tp": ("fsdp=4,tensor=2", "fsdp=2,tensor=4"),
    "cp": ("fsdp=2,context=4", "fsdp=4,context=2"),
    "ep": ("fsdp=2,expert=4", "fsdp=2,expert=2"),
    "ep-as-cp": ("fsdp=2,expert=4", "fsdp=4,expert=2"),
    "ep-as-dp": ("fsdp=2,expert=4", "fsdp=2,expert=2"),
    "cp-as-ep": ("fsdp=2,context=2,expert=2", "fsdp=1,context=4,expert=2"),
    "tp-as-ep": ("fsdp=4,tensor=2", "fsdp=2,tensor=4"),
    "shard-exp-on-fsdp": ("fsdp=2,expert=4", "fsdp=2,expert=2"),
    "fsdp-as-dp-for-attn": ("fsdp=4,expert=2", "fsdp=2,expert=2"),
}
"""Two meshes of each preset, which the dimensions of all three families allow."""


def case(
    model: str, layout: str, mesh: str, move: str = "", settings: str = "", rows: int = ROWS, *, balanced: bool = False
) -> Case:
    """A case with two microbatches, and with more rows where more devices shard them."""
    one = Case(model=model, layout=layout, mesh=mesh, move=move, settings=settings, rows=rows, balanced=balanced)
    sizes = mesh_sizes(mesh)
    readers = prod(sizes.get(axis, 1) for axis in layout_of(one).axes_sharding("batch", "input"))
    return replace(one, rows=max(rows, MICROBATCHES * readers), microbatches=MICROBATCHES)


def presets(model: str) -> Iterator[Case]:
    """Every preset on its two meshes."""
    for layout in preset_names():
        if layout not in UNTRAINED:
            yield from (case(model, layout, mesh) for mesh in MESHES[layout])


def attention(model: str, heads: str) -> Iterator[Case]:
    """The movements of attention, with rows in the order of the text and in head-tail order. ``heads``: settings with fewer
    KV heads than query heads."""
    cp, all_three = "fsdp=2,context=4", "fsdp=2,context=2,tensor=2"
    yield case(model, "cp", cp, rows=FEW_ROWS)
    yield case(model, "cp", cp, "attention=ring", heads, balanced=True)
    yield case(model, "cp", "fsdp=1,context=8", "attention=ring", rows=FEW_ROWS)
    yield case(model, "cp", cp, "attention=ulysses", heads)
    for how in ("gather", "ring", "ulysses"):
        yield case(model, "cp-tp", all_three, f"attention={how}", heads, balanced=how == "gather")


def experts(model: str, dropping: str) -> Iterator[Case]:
    """The movements of tokens and experts. ``dropping``: settings under which tokens are dropped."""
    ep, all_three = "fsdp=2,expert=4", "fsdp=2,expert=2,tensor=2"
    for how in ("ring", "weights"):
        yield case(model, "ep", "fsdp=2,expert=2", f"moe={how}", dropping)
        yield case(model, "cp-as-ep", "fsdp=2,context=2,expert=2", f"moe={how}")
        yield case(model, "tp-as-ep", "fsdp=2,tensor=4", f"moe={how}")
    yield case(model, "ep-as-cp", ep, settings=dropping, balanced=True)
    yield case(model, "ep-as-cp", ep, "attention=ring", rows=FEW_ROWS)
    yield case(model, "ep-tp", all_three)


def experts_further(model: str, dropping: str) -> Iterator[Case]:
    """Further cases that apply to all families with experts, under one of them."""
    ep, all_three = "fsdp=2,expert=4", "fsdp=2,expert=2,tensor=2"
    for how in ("ring", "weights"):
        yield case(model, "ep-as-cp", ep, f"moe={how}", dropping, balanced=True)
        yield case(model, "ep-tp", all_three, f"moe={how}")
    yield case(model, "ep-as-cp-tp", all_three, "attention=ring", dropping)
    yield case(model, "ep-as-cp", ep, "attention=ulysses", dropping)
    yield case(model, "ep-of-whole-tokens", ep)
    yield case(model, "cp-ep", "fsdp=2,context=2,expert=2")
    for layout in ("fsdp-tp", "cp", "cp-as-ep", "tp-as-ep"):
        yield case(model, layout, MESHES[layout][0], settings=dropping)


def dense() -> Iterator[Case]:
    """Cases of a dense model only: shared KV heads, a tied embedding."""
    yield case(LLAMA3, "tp", "tensor=8")
    yield case(LLAMA3, "fsdp-tp", "fsdp=2,tensor=4", settings=SHARED_HEADS)
    yield case(LLAMA3, "tp-whole-keys", "fsdp=2,tensor=4", settings="num_kv_heads=2")
    yield case(LLAMA3, "tp-whole-rows", "fsdp=4,tensor=2")
    yield case(LLAMA3, "cp", "fsdp=2,context=4", "attention=ring", SHARED_HEADS)
    for layout in ("fsdp", "fsdp-tp", "tp-whole-rows"):
        mesh = MESHES[layout][0] if layout in MESHES else "fsdp=4,tensor=2"
        yield case(LLAMA3, layout, mesh, settings="tied=true")


def updates() -> Iterator[Case]:
    """Updates that axes shard and weights that they do not."""
    yield case(LLAMA3, "zero1", "data=8")
    yield case(LLAMA3, "zero2", "data=4", settings="tied=true")
    yield case(LLAMA3, "hsdp-zero1", "data=4,fsdp=2")
    yield case(LLAMA3, "hsdp-zero2", "data=2,fsdp=4")
    yield case(LLAMA3, "zero-tp", "data=2,replica=2,tensor=2")
    yield case(MIXTRAL, "zero-ep", "data=2,fsdp=2,expert=2")


def kept() -> Iterator[Case]:
    """Weights that stay gathered from the forward to the backward pass."""
    yield case(LLAMA3, "kept", "fsdp=4", settings="tied=true")
    yield case(LLAMA3, "kept-tp", "data=2,fsdp=2,tensor=2")
    yield case(MIXTRAL, "kept-ep", "fsdp=2,expert=2")


def losses() -> Iterator[Case]:
    """The loss in chunks: of rows, of shards of rows, over a vocabulary that axes shard, with its weight used twice.

    No stack has a single layer: its weights would be gathered once for all microbatches.
    """
    yield replace(case(LLAMA3, "fsdp", "fsdp=8"), loss_chunks=16)
    yield replace(case(LLAMA3, "cp", "fsdp=2,context=4", "attention=ring", balanced=True), loss_chunks=4)
    yield replace(case(LLAMA3, "fsdp-tp", "fsdp=4,tensor=2", settings="tied=true"), loss_chunks=2)
    yield replace(case(LLAMA3, "tp", "tensor=8", settings="num_kv_heads=8"), loss_chunks=8)
    yield replace(case(LLAMA3, "zero2", "data=4", settings="tied=true"), loss_chunks=4)
    yield replace(case(DEEPSEEK3, "ep-as-cp", "fsdp=2,expert=2", settings="num_dense_layers=0"), loss_chunks=4)


def policies() -> Iterator[Case]:
    """Policies of recomputation, on meshes of four, which both engines train: each by name, single activations kept, put on the host and
    made again, a file, some layers, a stack.

    No run of layers is a single one: its weights would be gathered once for all microbatches.
    """
    ep, four = "fsdp=2,expert=2", "num_layers=4"
    two_dense = f"{four},num_dense_layers=2"
    of_llama3 = (
        (case(LLAMA3, "hsdp", "data=2,fsdp=2"), "dots"),
        (case(LLAMA3, "fsdp", "fsdp=4"), "none"),
        (case(LLAMA3, "fsdp-tp", "fsdp=2,tensor=2"), "keep=attention.attended,mlp.gate"),
        (case(LLAMA3, "cp", "fsdp=2,context=2", "attention=ring"), "host=residual.stream,mlp.up"),
        (case(LLAMA3, "fsdp", "fsdp=4", settings=f"{four},tied=true"), "policy.yaml"),
        (case(LLAMA3, "fsdp-tp", "fsdp=2,tensor=2", settings=four), "full@0:2+none,recompute=mlp.hidden"),
    )
    of_mixtral = (
        (case(MIXTRAL, "ep", ep), "dots"),
        (case(MIXTRAL, "ep-as-cp", ep), "none"),
        (case(MIXTRAL, "ep", ep), "keep=moe.gate,moe.up,moe.dispatched,router.scores"),
        (case(MIXTRAL, "ep", ep, "moe=ring"), "dots,host=moe.output"),
        (case(MIXTRAL, "hsdp", "data=2,fsdp=2"), "none,recompute=weights"),
    )
    of_deepseek3 = (
        (
            case(DEEPSEEK3, "ep", ep, settings=two_dense),
            "keep=attention.latent,attention.query_latent,shared.up,moe.dispatched",
        ),
        (case(DEEPSEEK3, "ep-as-cp", ep, settings=two_dense), "none@moe_layers+host=residual.stream"),
        (case(DEEPSEEK3, "cp", "fsdp=2,context=2", settings=two_dense), "dots"),
        (case(DEEPSEEK3, "fsdp-tp", "fsdp=2,tensor=2", settings=two_dense), "full@moe_layers+dots"),
    )
    for one, policy in (*of_llama3, *of_mixtral, *of_deepseek3):
        yield replace(one, remat=policy)


COVERING: tuple[Case, ...] = (
    case(LLAMA3, "fsdp", "fsdp=8"),
    case(LLAMA3, "hsdp", "data=4,fsdp=2"),
    case(LLAMA3, "hsdp", "data=2,fsdp=4"),
    case(LLAMA3, "tp", "data=2,tensor=4", settings=SHARED_HEADS),
    case(LLAMA3, "cp", "fsdp=2,context=4", "attention=ring", SHARED_HEADS),
    case(MIXTRAL, "ddp", "data=4"),
    case(MIXTRAL, "fsdp-tp", "fsdp=4,tensor=2"),
    case(MIXTRAL, "ep", "fsdp=2,expert=2"),
    case(MIXTRAL, "ep-as-cp", "fsdp=2,expert=4", settings="capacity_factor=1.0", rows=FEW_ROWS, balanced=True),
    case(MIXTRAL, "cp-as-ep", "fsdp=2,context=2,expert=2", "attention=ulysses,moe=ring"),
    case(MIXTRAL, "tp-as-ep", "fsdp=2,tensor=4"),
    case(MIXTRAL, "shard-exp-on-fsdp", "fsdp=2,expert=2"),
    case(DEEPSEEK3, "cp", "fsdp=2,context=2", "attention=ring"),
    case(DEEPSEEK3, "ep-as-cp", "fsdp=2,expert=2"),
    case(DEEPSEEK3, "ep", "fsdp=2,expert=2", "moe=weights"),
    case(DEEPSEEK3, "ep-as-dp", "fsdp=2,expert=2"),
    case(DEEPSEEK3, "fsdp-as-dp-for-attn", "fsdp=2,expert=2"),
)

WHOLE: tuple[Case, ...] = tuple(
    dict.fromkeys(
        [
            *presets(LLAMA3),
            *attention(LLAMA3, SHARED_HEADS),
            *dense(),
            *updates(),
            *kept(),
            *losses(),
            *policies(),
            *presets(MIXTRAL),
            *experts(MIXTRAL, "capacity_factor=1.0"),
            *experts_further(MIXTRAL, "capacity_factor=1.0"),
            *presets(DEEPSEEK3),
            *attention(DEEPSEEK3, ""),
            *experts(DEEPSEEK3, "capacity_factor=1.25"),
            *COVERING,
        ]
    )
)

FSDP_8, HSDP_4_2, HSDP_2_4 = (
    case(LLAMA3, layout, mesh)
    for layout, mesh in (("fsdp", "fsdp=8"), ("hsdp", "data=4,fsdp=2"), ("hsdp", "data=2,fsdp=4"))
)
CP_2 = case(DEEPSEEK3, "cp", "fsdp=2,context=2", "attention=ring")
EP_AS_CP_2 = case(DEEPSEEK3, "ep-as-cp", "fsdp=2,expert=2")
PAIRS = ((HSDP_4_2, FSDP_8), (HSDP_2_4, FSDP_8), (EP_AS_CP_2, CP_2))
"""Layouts that are compared with each other too, by name."""


def covering(model: str) -> list[Case]:
    return [case for case in COVERING if case.model == model]
