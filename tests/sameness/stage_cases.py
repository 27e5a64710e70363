"""The stages under which every family is trained and compared with one device: even and uneven ones, one and two of each rank, one to
eight microbatches, with every other role beside them."""

from __future__ import annotations

from tests.engine_jax.steps import Case
from tests.sameness.cases import DEEPSEEK3, LLAMA3, MIXTRAL

TITLE = "Stages on JAX"
"""Of their section in docs/sameness.md."""

KEPT: tuple[Case, ...] = (
    Case(
        model=LLAMA3,
        layout="pp",
        mesh="stage=2,fsdp=2",
        microbatches=4,
        settings="tied=true",
        stages="E|t|t|L",
        remat="dots",
    ),
    Case(model=LLAMA3, layout="pp-kept", mesh="stage=2,fsdp=2", microbatches=4, stages="Ett|L", remat="none"),
    Case(
        model=LLAMA3,
        layout="pp-tp",
        mesh="stage=2,fsdp=2,tensor=2",
        microbatches=4,
        settings="num_kv_heads=4",
        remat="keep=mlp.gate,attention.output",
    ),
    Case(
        model=DEEPSEEK3,
        layout="pp-ep-as-cp",
        mesh="stage=2,fsdp=2,expert=2",
        microbatches=2,
        stages="Ett|tL",
        remat="none",
    ),
    Case(model=MIXTRAL, layout="pp-ep", mesh="stage=2,fsdp=2,expert=2", microbatches=2, remat="dots"),
)
"""Live microbatches keep more than the inputs of layers: of two stages of each rank, with gathered weights, tensor, padding and experts."""

SHARED: tuple[Case, ...] = (
    Case(model=LLAMA3, layout="pp-ends", mesh="stage=2,fsdp=2", microbatches=4, rows=16),
    Case(
        model=LLAMA3,
        layout="pp-ends-tied",
        mesh="data=2,stage=2,fsdp=2",
        microbatches=2,
        settings="num_layers=4,tied=true",
        stages="t|t|t|t",
    ),
    Case(model=LLAMA3, layout="pp-ends-tp", mesh="stage=2,fsdp=1,tensor=2", microbatches=2, stages="t|t"),
    Case(
        model=DEEPSEEK3,
        layout="pp-ends-ep-as-cp",
        mesh="stage=2,fsdp=1,expert=2",
        microbatches=4,
        stages="tt|t",
        rows=16,
    ),
    Case(
        model=MIXTRAL,
        layout="pp-logits",
        mesh="stage=4,fsdp=1,expert=2",
        microbatches=4,
        settings="num_layers=4",
        remat="dots",
    ),
)
"""All stages share an end, or both: its rows, its vocabulary, or its tokens are sharded over them."""

STAGED: tuple[Case, ...] = (
    # Two stages of each rank; the first and the last have an end and no layer.
    Case(model=LLAMA3, layout="pp", mesh="stage=2,fsdp=2", microbatches=4, settings="tied=true", stages="E|t|t|L"),
    # Padding: the first stage has two layers, one with experts; the second one, and the logits.
    Case(model=DEEPSEEK3, layout="pp-ep-as-cp", mesh="stage=2,fsdp=2,expert=2", microbatches=2, stages="Ett|tL"),
    Case(model=LLAMA3, layout="pp", mesh="stage=2,fsdp=2", microbatches=1),
    Case(model=LLAMA3, layout="pp", mesh="stage=2,data=2,fsdp=2", microbatches=2),
    Case(model=LLAMA3, layout="pp", mesh="stage=3,fsdp=1", microbatches=8, settings="num_layers=5"),
    Case(model=LLAMA3, layout="pp", mesh="stage=4,fsdp=2", microbatches=4, settings="num_layers=6", stages="E|(t|)*6L"),
    Case(model=LLAMA3, layout="pp-tp", mesh="stage=2,fsdp=2,tensor=2", microbatches=4, settings="num_kv_heads=4"),
    Case(model=LLAMA3, layout="pp-cp", mesh="stage=2,fsdp=2,context=2", microbatches=4),
    Case(model=MIXTRAL, layout="pp-ep", mesh="stage=2,fsdp=2,expert=2", microbatches=2),
    Case(
        model=MIXTRAL,
        layout="pp-ep",
        mesh="stage=4,fsdp=1,expert=2",
        microbatches=4,
        settings="num_layers=6,capacity_factor=1.0",
        stages="E|(t|)*6L",
    ),
    Case(model=MIXTRAL, layout="pp-ep-as-cp", mesh="stage=2,fsdp=2,expert=2", microbatches=4, move="moe=ring"),
    Case(model=DEEPSEEK3, layout="pp", mesh="stage=3,fsdp=2", microbatches=3, rows=12),
    Case(model=DEEPSEEK3, layout="pp-ep", mesh="stage=2,fsdp=2,expert=2", microbatches=2, stages="E|t|t|tL"),
    Case(model=DEEPSEEK3, layout="pp-cp", mesh="stage=2,fsdp=2,context=2", microbatches=4, move="attention=ulysses"),
    # A ring of attention: of two devices, and of three with unequal stages and experts.
    Case(model=LLAMA3, layout="pp-cp", mesh="stage=2,fsdp=1,context=2", microbatches=2, move="attention=ring"),
    Case(
        model=DEEPSEEK3,
        layout="pp-ep-as-cp",
        mesh="stage=2,fsdp=1,expert=4",
        microbatches=2,
        move="attention=ring",
        stages="Ett|tL",
    ),
    Case(
        model=LLAMA3,
        layout="pp-cp",
        mesh="stage=2,fsdp=1,context=4",
        microbatches=4,
        move="attention=ring",
        balanced=True,
    ),
    # Weights that stay gathered through a step, of padding too.
    Case(model=LLAMA3, layout="pp-kept", mesh="stage=2,fsdp=2", microbatches=4, stages="Ett|L"),
    Case(model=MIXTRAL, layout="pp-ep-kept", mesh="stage=2,fsdp=2,expert=2", microbatches=2, stages="E|t|t|L"),
    *KEPT,
    *SHARED,
    # Each family in three and in four stages, with one and two of each rank, and with every role beside them.
    Case(model=LLAMA3, layout="pp", mesh="stage=2,fsdp=1", microbatches=5, rows=5),
    Case(model=LLAMA3, layout="pp", mesh="stage=2,fsdp=1", microbatches=7, rows=7, settings="num_layers=3"),
    Case(
        model=LLAMA3,
        layout="pp",
        mesh="stage=3,fsdp=2",
        microbatches=6,
        rows=12,
        settings="num_layers=5",
        stages="E|tt|t|t|t|L",
    ),
    Case(
        model=LLAMA3,
        layout="pp-tp",
        mesh="stage=2,fsdp=1,tensor=2",
        microbatches=4,
        settings="num_kv_heads=4",
        stages="E|t|t|L",
    ),
    Case(model=LLAMA3, layout="pipe-last", mesh="fsdp=2,context=2,pipe=2", microbatches=4, stages="E|t|t|L"),
    Case(model=MIXTRAL, layout="pp", mesh="stage=3,fsdp=2", microbatches=6, rows=12, settings="num_layers=4"),
    Case(model=MIXTRAL, layout="pp-cp", mesh="stage=2,fsdp=1,context=2", microbatches=8, stages="E|t|t|L"),
    Case(model=MIXTRAL, layout="pp-ep-tp", mesh="stage=2,fsdp=1,expert=2,tensor=2", microbatches=2),
    Case(model=DEEPSEEK3, layout="pp", mesh="stage=4,fsdp=2", microbatches=4, stages="Et|t|t|L"),
    Case(model=DEEPSEEK3, layout="pp", mesh="stage=2,data=2,fsdp=1", microbatches=4, stages="E|tt|t|L"),
    Case(model=DEEPSEEK3, layout="pp-tp", mesh="stage=2,fsdp=2,tensor=2", microbatches=4, stages="E|t|t|tL"),
    Case(model=DEEPSEEK3, layout="pp-ep-as-cp", mesh="stage=2,fsdp=1,expert=2", microbatches=8, stages="E|t|t|tL"),
)
