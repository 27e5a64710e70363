"""The names of a program's tensors by what its operations make of them."""

from __future__ import annotations

from dataclasses import fields

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.core.model.names import NO_NAMES, STREAM, TensorNames
from shardwright.core.program.draft import Draft
from shardwright.core.program.names import tensor_names
from shardwright.core.program.program import Program, Value
from shardwright.models import build
from shardwright.models.layers.ends import batch_fields, embedding
from tests.models.drawn_programs import Drawing, drawn_program


def named(names: TensorNames) -> dict[str, frozenset[str]]:
    """Every name of each field."""
    values = {one.name: getattr(names, one.name) for one in fields(names)}
    return {
        name: frozenset([value] if isinstance(value, str) else value) - {""} for name, value in values.items() if value
    }


@pytest.mark.parametrize("model", ["llama3-test", "mixtral-test", "deepseek3-test"])
def test_every_name_is_a_row_of_the_table(model: str) -> None:
    table = build(model)
    rows = {row.name for row in table.activations} | {weight.name_in_layer for weight in table.weights}
    # Values of experts that no array has are of the table all the same.
    for what, names in named(table.names).items():
        assert names <= rows | {one.output for one in table.operations}, what
    assert STREAM in rows


def test_the_experts_of_a_model() -> None:
    names = build("deepseek3-test").names
    assert (names.tokens, names.dispatched, names.received) == ("router.grouped", "router.dispatched", "moe.dispatched")
    assert (names.expert_outputs, names.returned, names.combined) == (
        "moe.output",
        "router.returned",
        "router.combined",
    )
    assert (names.reading_weights, names.output_weights) == (("moe.gate", "moe.up"), ("moe.down",))


def test_keys_that_are_made_of_a_latent_are_made_where_they_are_attended_to() -> None:
    made = {"attention.keys_attended", "attention.values_attended"}
    assert build("deepseek3-test").names.made_from_taken == made
    assert build("deepseek3-test").names.of_a_ring == made | {"attention.attended", "attention.latent_attended"}
    assert build("llama3-test").names.made_from_taken == frozenset()


def test_a_user_s_own_program_has_none() -> None:
    assert named(NO_NAMES) == {}


@pytest.mark.parametrize("seed", range(30))
def test_drawn_programs_have_the_names_of_their_own_operations(seed: int) -> None:
    program = drawn_program(Drawing(seed=seed))
    there = {value.name for step in program.steps for value in (*step.inputs, *step.outputs)}
    there |= {value.row for step in program.steps for value in step.outputs}
    there |= {weight.name for step in program.steps for weight in step.weights}
    names = tensor_names(program)
    for what, of_field in named(names).items():
        assert of_field <= there, what
    assert all((names.attended, names.queries, names.scores))
    assert not names.received


def stream_called(name: str) -> Program:
    draft = Draft(sizes={"M": 8, "V": 16}, initializer_stddev=0.02)
    batch = batch_fields(draft)
    residual = draft.part("residual")
    stream = residual.scale(embedding(draft, batch), 1.0, name)

    def layer(stream: Value) -> Value:
        return residual.norm(stream, "norm", name, eps=1e-5)

    draft.layers("layers", 1, layer, stream)
    return draft.finished()


def test_a_stream_of_another_name_is_refused() -> None:
    with pytest.raises(InputError) as refused:
        tensor_names(stream_called("river"))
    assert str(refused.value) == (
        "the layers of 'layers' get 'residual.river'. Call it 'residual.stream', as policies do."
    )


def test_two_names_of_what_the_core_knows_one_are_refused() -> None:
    draft = Draft(sizes={"M": 8, "F": 4, "V": 16}, initializer_stddev=0.02)
    batch = batch_fields(draft)
    embed = draft.part("embedding")
    ids = embed.take(batch["tokens"], "ids")
    for weight, name in (("tokens", "output"), ("others", "other_output")):
        embed.embed(ids, weight, name)
    program = Program(sizes={}, fields=(), steps=tuple(draft._steps), stacks=(), initializer_stddev=0.02)
    with pytest.raises(InputError) as refused:
        tensor_names(program)
    assert str(refused.value) == (
        "'embedding.other_output' and 'embedding.output' are the same operation of two layers. Give them one name."
    )
