"""The placement of every tensor of a step under a configuration, compared with Flax and with recorded MaxText output."""

from __future__ import annotations

import random
from math import prod

import pytest
from flax.core.spmd import apply_rules
from flax.linen import logical_to_mesh_axes

from shardwright.core.mesh.mesh import Mesh
from shardwright.interop.maxtext.reading.merging import merged
from shardwright.interop.maxtext.reading.reading import parse_given, parse_rule_file
from shardwright.interop.maxtext.reading.rules import Rule, rule
from shardwright.interop.maxtext.reading.vocabulary import LOGICAL_NAMES
from shardwright.interop.maxtext.resolution.placement import placed_under
from shardwright.interop.maxtext.resolution.tensors import StepShape, tensors_of
from shardwright.models import build, names
from tests.interop.rule_files import CLEAN

AXES = ("data", "fsdp", "fsdp_transpose", "context", "tensor", "expert")
STEP = StepShape(batch=8, length=32, path="capacity")
EXPERTS = (("activation_batch_moe", "data", "fsdp", "fsdp_transpose", "expert"), ("activation_exp", "expert"))


def tensor_of(rules: list[Rule], sizes: dict[str, int], name: str, step: StepShape = STEP):
    configuration = merged([parse_rule_file("logical_axis_rules: []", "none.yml")])
    imported = placed_under(configuration, Mesh.of(**sizes), build("mixtral-test"), step).under(rules)
    return next(placed for placed in imported.placed if placed.tensor.name == name)


@pytest.mark.parametrize("model", ["llama3-test", "mixtral-test", "deepseek3-test"])
def test_every_tensor_is_placed_as_by_flax(model):
    """Flax resolves the names of a tensor, then MaxText removes the axes of size 1."""
    rng = random.Random(5)
    configuration = merged([parse_rule_file(CLEAN, "clean.yml")])
    compared = 0
    for _ in range(60):
        sizes = {axis: rng.choice((1, 2, 4)) for axis in AXES}
        rules = [rule(name, *rng.sample(AXES, rng.randrange(4))) for name in rng.choices(LOGICAL_NAMES, k=90)]
        for dialect in ("nnx", "flax-nnx"):
            imported = placed_under(configuration, Mesh.of(**sizes), build(model), STEP, dialect).under(rules)
            for placed in imported.placed:
                annotated = placed.tensor.names
                as_flax = tuple((line.name, line.axes) for line in rules)
                linen = logical_to_mesh_axes(annotated, as_flax) or ()
                spec = (
                    apply_rules(annotated, as_flax)
                    if dialect == "flax-nnx" and placed.tensor.kind == "weight"
                    else linen
                )
                shardings = [(axes,) if isinstance(axes, str) else axes or () for axes in spec]
                assert placed.dim_axes == tuple(tuple(a for a in axes if sizes.get(a, 1) > 1) for axes in shardings)
                compared += 1
    assert compared > 2000


def test_every_weight_of_every_model_has_names():
    for name in names():
        table = build(name)
        weights = [tensor for tensor in tensors_of(table, STEP) if tensor.kind == "weight"]
        assert [tensor.name for tensor in weights] == [weight.name for weight in table.weights]
        assert sum(prod(tensor.shape) for tensor in weights) == sum(w.num_parameters for w in table.weights)
        assert {n for tensor in weights for n in tensor.names if n} <= set(LOGICAL_NAMES)


def test_rows_that_come_first_take_the_axis_from_the_experts():
    sizes = {"data": 2, "fsdp": 2, "fsdp_transpose": 2, "expert": 2, "tensor": 2}
    lines = [rule(*each) for each in EXPERTS]
    last = [*lines, rule("activation_embed_moe", "tensor")]
    assert tensor_of(last, sizes, "moe.dispatched").dim_axes == (
        (),
        ("data", "fsdp", "fsdp_transpose", "expert"),
        (),
        ("tensor",),
    )
    reordered = [last[1], last[2], last[0]]
    assert tensor_of(reordered, sizes, "moe.dispatched").dim_axes == (("expert",), (), (), ("tensor",))


def test_with_the_flag_each_dim_is_resolved_alone_and_rows_lose_the_experts_axis():
    sizes = {"data": 2, "fsdp": 2, "fsdp_transpose": 2, "expert": 2}
    lines = [rule(*each) for each in EXPERTS]
    step = StepShape(batch=8, length=32, path="capacity", peel=True)
    assert tensor_of(lines, sizes, "moe.dispatched", step).dim_axes == (
        ("expert",),
        ("data", "fsdp", "fsdp_transpose"),
        (),
        (),
    )
    # The flag does not change the masks, which keep the axis on their rows.
    assert tensor_of(lines, sizes, "moe.masks", step).dim_axes[0] == ("data", "fsdp", "fsdp_transpose", "expert")


def test_a_conflict_over_an_axis_of_size_1_is_a_conflict():
    lines = [rule("embed", "context", "fsdp"), rule("q_heads", "context", "tensor")]
    found = tensor_of(lines, {"fsdp": 2, "tensor": 2, "context": 1}, "layers.attention.q")
    assert found.dim_axes == ((), ("fsdp",), (), ())


BASE = """\
mesh_axes: [fsdp]
logical_axis_rules: [[a, x], [b, y], [a, z], [c, x]]
"""


def as_text(rules) -> list[str]:
    return [f"{line.name}:{'+'.join(line.axes)}" for line in rules]


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        ("logical_axis_rules: [[b, w]]", ["a:x", "a:z", "c:x", "b:w"]),
        ("logical_axis_rules: [[a, x], [d, []]]", ["b:y", "c:x", "a:x", "d:"]),
        ("logical_axis_rules: []", ["a:x", "b:y", "a:z", "c:x"]),
        ("override_logical_axis_rules: true\nlogical_axis_rules: [[b, w]]", ["b:w"]),
        ("override_logical_axis_rules: true", []),
        ("context_sharding: expert", ["a:x", "b:y", "a:z", "c:x"]),
    ],
)
def test_a_later_source_restates_names(later, expected):
    assert as_text(merged([parse_rule_file(BASE, "base.yml"), parse_rule_file(later, "model.yml")]).rules) == expected


def test_base_then_model_then_command_line_then_preset():
    base = parse_rule_file(BASE, "base.yml")
    model = parse_rule_file("logical_axis_rules: [[b, w]]", "model.yml")
    given = parse_given(("logical_axis_rules=[[a, v]]", "ici_fsdp_parallelism=4"))
    found = merged([base, model, given])
    assert as_text(found.rules) == ["c:x", "b:w", "a:v"]
    assert found.sizes["ici_fsdp_parallelism"].value == 4
    assert [each.name for each in found.restated] == ["b", "a"]
    assert as_text(found.restated[0].kept) == ["b:w", "c:x", "a:v"]
    preset = parse_rule_file("mesh_axes: [expert]\nlogical_axis_rules: [[a, expert]]", "preset.yml")
    replaced = merged([base, model, given], preset)
    assert as_text(replaced.rules) == ["a:expert"]
    assert [word.value for word in replaced.mesh_axes] == ["expert"]
    assert [hidden.position.source for hidden in replaced.hidden] == ["model.yml", "--given"]
