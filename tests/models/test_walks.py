"""A walk has each step of a program once, after those that it needs, and its groups are what engines do together."""

from __future__ import annotations

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.core.program.draft import Draft
from shardwright.core.program.primitives import Attend, Combine, Loss, Take
from shardwright.core.program.program import Step
from shardwright.core.program.walk import (
    AttentionGroup,
    ExpertGroup,
    LossGroup,
    Walk,
    steps_of,
    walk_through,
    weights_in,
)
from shardwright.models import build
from shardwright.models.layers.attention import masks
from shardwright.models.layers.decoder import program_of, walk_of
from shardwright.models.layers.ends import batch_fields, embedding
from tests.models.drawn_programs import Drawing, drawn_program

MODELS = ("llama3-test", "mixtral-test", "deepseek3-test", "deepseek3-16b")


def walk_of_model(name: str) -> Walk:
    return walk_of(build(name).architecture)


def assert_is_whole(walk: Walk) -> None:
    """Each step is walked once, and every value is there when it is read."""
    ends = (walk.of_batch, walk.before, *walk.layers.values(), walk.after)
    walked = [step for operations in ends for operation in operations for step in steps_of(operation)]
    assert sorted(map(id, walked)) == sorted(map(id, walk.program.steps))
    there = set(walk.program.fields)
    for operations in (walk.of_batch, walk.before):
        there = read_in_order(operations, there)
    for stack in walk.program.stacks:
        assert stack.output in read_in_order(walk.layers[stack.name], there | {stack.input})
    read_in_order(walk.after, there | {walk.output})


def read_in_order(operations, there):
    there = set(there)
    for operation in operations:
        for step in steps_of(operation):
            assert there.issuperset(step.inputs), (type(step.does).__name__, [str(value) for value in step.inputs])
            there.update(step.outputs)
    return there


@pytest.mark.parametrize("name", MODELS)
def test_every_step_of_a_model_is_walked_once(name: str):
    assert_is_whole(walk_of_model(name))


def test_every_step_of_a_drawn_program_is_walked_once():
    for seed in range(60):
        assert_is_whole(walk_through(drawn_program(Drawing(seed=seed))))


@pytest.mark.parametrize("name", MODELS)
def test_groups_are_attention_experts_and_the_loss(name: str):
    walk = walk_of_model(name)
    for operations in (*walk.layers.values(), walk.after):
        for operation in operations:
            if isinstance(operation, Step):
                assert not isinstance(operation.does, Attend | Combine | Loss)
                assert not (isinstance(operation.does, Take) and operation.does.kind in ("keys", "dispatch", "combine"))
            else:
                assert isinstance(operation, AttentionGroup | ExpertGroup | LossGroup)


def test_what_a_group_of_attention_exchanges():
    def names(model: str) -> tuple[list[str], list[str], bool]:
        operations = [one for layer in walk_of_model(model).layers.values() for one in layer]
        group = next(one for one in operations if isinstance(one, AttentionGroup))
        return [take.output.name for take in group.takes], [*weights_in(group.between)], group.shares_heads

    assert names("llama3-test") == (["attention.keys_attended", "attention.values_attended"], [], True)
    assert names("deepseek3-test") == (["attention.latent_attended"], ["attention.kv_up"], False)


def test_what_is_made_once_a_step():
    """Angles for queries and keys alike, one mask, and the tokens that are routed, of all stacks."""
    walk = walk_of_model("deepseek3-test")
    assert [type(step.does).__name__ for step in walk.prepared] == ["Rotate", "Attend", "Route"]
    readers = [step for step in walk.program.steps if walk.prepared_at(step) is not None]
    assert len(readers) == 2 * 3 + 1
    assert {step.output.row for step in walk.of_batch} >= {"attention.q_positions", "router.valid"}
    assert "logits.targets" not in {step.output.row for step in walk.of_batch}


def test_products_with_one_input():
    walk = walk_of_model("deepseek3-test")
    products = {
        step.weights[0].name: step for step in walk.program.steps if step.weights and step.stack == "moe_layers"
    }
    assert walk.weights_of_input(products["attention.kv_down"]) == ("attention.q_down", "attention.kv_down")
    assert walk.weights_of_input(products["attention.o"]) == ("attention.o",)
    assert walk.weights_of_input(products["moe.up"]) == ("moe.gate", "moe.up")


def test_the_weight_of_both_ends():
    assert not walk_of_model("llama3-test").tied
    assert walk_of(build("llama3-test", {"tied": "true"}).architecture).tied == {"embedding.tokens"}


def test_named_values_are_those_that_a_policy_may_keep():
    """A row of ``Operation`` is what a policy may keep; takes name what they make where they move it."""
    for model in MODELS:
        table = build(model)
        takes = {step.output.name for step in program_of(table.architecture).steps if isinstance(step.does, Take)}
        named = {value.name for value in walk_of(table.architecture).named}
        rows = {row.output for row in table.operations}
        assert named - takes == rows - takes


def test_a_value_inside_of_a_group_is_not_read_outside():
    draft = Draft(sizes={"M": 8, "H": 2, "K": 2, "D": 4, "V": 16}, initializer_stddev=0.02)
    draft.section("ends")
    batch = batch_fields(draft)
    stream, of_all, attention = embedding(draft, batch), masks(draft, batch), draft.part("attention")

    def layer(stream):
        x = attention.take(stream, "input")
        q, k, v = (attention.product("B L M, M H D -> B L H D", x, name, name) for name in "qkv")
        q = attention.take(q, "queries_attended", "B T H D")
        k, v = (attention.take(x, f"{x.name[-1]}_attended", "B S H D") for x in (k, v))
        a = attention.attend(q, k, attention.scale(v, 2.0), "attended", masks=of_all.attended, scale=0.5)
        a = attention.take(a, "output", "B L H D")
        back = attention.take(attention.scale(v, 3.0, "again"), "back", "B L H D")
        both = attention.add(a, back)
        return draft.part("residual").add(
            stream, attention.product("B L H D, H D M -> B L M", both, "o", "projected"), name="stream"
        )

    stream = draft.layers("layers", 1, layer, stream)
    residual, logits = draft.part("residual"), draft.part("logits")
    x = logits.take(residual.norm(stream, "final_norm", eps=1e-5), "input")
    scores = logits.product("B L M, M V -> B L V", x, "kernel", "scores")
    logits.loss(scores, logits.take(batch["targets"], "targets"), logits.take(batch["valid"], "valid"))
    with pytest.raises(InputError, match=r"'attention\.v_attended' is made for 'attention\.attended' alone"):
        walk_through(draft.finished())
