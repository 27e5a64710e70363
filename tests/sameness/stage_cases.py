"""The stages under which every family is trained and compared with one device: even and uneven ones, one and two of each rank, one to
eight microbatches, with every other role beside them."""

from __future__ import annotations

from tests.engine_jax.steps import Case
from tests.sameness.cases import DEEPSEEK3, LLAMA3, MIXTRAL

TITLE = "Stages on JAX"
"""Of their section in docs/sameness.md."""

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
)
