"""A user's own weights as a table, and every description that is refused."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from shardwright import InputError, Mesh, NotationError, Request, activation_spec, load_layout, make_plan, table_of
from shardwright.core.findings.finding import Finding

SHAPES = {
    "h/0/q": ((64, 4, 16), "float32"),
    "h/1/q": ((64, 4, 16), "float32"),
    "h/0/scale": ((64,), "float32"),
    "h/1/scale": ((64,), "float32"),
}
NAMES = {"h/*/q": "attention: embed heads head_dim", "h/*/scale": "residual: norm"}


def test_weights_are_stored_as_those_of_our_own_models() -> None:
    table = table_of(SHAPES, NAMES)
    plan = make_plan(Request(layout=load_layout("fsdp-tp"), table=table, devices=8, batch=8, length=16))
    assert {row.name: (str(row.at_rest), str(row.in_use)) for row in plan.weights} == {
        "h/0/q": ("embed/fsdp heads/tensor head_dim", "embed heads/tensor head_dim"),
        "h/1/q": ("embed/fsdp heads/tensor head_dim", "embed heads/tensor head_dim"),
        "h/0/scale": ("norm", "norm"),
        "h/1/scale": ("norm", "norm"),
    }


def test_the_usual_dims_are_storage_dims_in_any_position() -> None:
    shapes = {"out": ((4, 16, 64), "float32"), "up": ((8, 32), "float32"), "other": ((16, 24), "float32")}
    names = {
        "out": "attention: heads head_dim embed",
        "up": "attention: kv_heads kv_lora",
        "other": "mlp: mlp embed_out",
    }
    plan = make_plan(Request(layout=load_layout("fsdp"), table=table_of(shapes, names), devices=4, batch=8, length=16))
    assert {row.name: str(row.at_rest) for row in plan.weights} == {
        "out": "heads head_dim embed/fsdp",
        "up": "kv_heads kv_lora/fsdp",
        # Where a weight has none of those dims, the first dim.
        "other": "mlp/fsdp embed_out",
    }


def test_stacked_layers_are_one_row() -> None:
    table = table_of({"q": ((12, 64, 4, 16), "bfloat16")}, {"q": "attention: layers embed heads head_dim"})
    (weight,) = table.weights
    assert (weight.num, weight.stack, weight.shape, weight.dtype) == (12, "layers", (64, 4, 16), "bfloat16")


def test_a_dim_with_an_underscore_is_never_sharded() -> None:
    table = table_of({"taps": ((8, 64), "float32")}, {"taps": "mlp: _taps embed"})
    plan = make_plan(Request(layout=load_layout("fsdp"), table=table, devices=8, batch=8, length=16))
    assert str(plan.weights[0].at_rest) == "_taps embed/fsdp"


def test_layers_in_one_weight_are_planned_under_any_name() -> None:
    table = table_of({"q": ((12, 64, 4, 16), "float32")}, {"q": "attention: layers embed heads head_dim"})
    plan = make_plan(Request(layout=load_layout("fsdp"), table=table, devices=8, batch=8, length=16))
    assert plan.memory.weights_bytes == 12 * 64 * 4 * 16 * 4 // 8


def test_under_pytorch_a_weight_whose_dim_0_may_not_be_sharded_is_replicated() -> None:
    shapes = {"taps": ((8, 64), "float32"), "heat": ((), "float32"), "up": ((96, 64), "float32")}
    table = table_of(shapes, {"taps": "mlp: _taps embed", "heat": "mlp:", "up": "mlp: mlp embed"})
    plan = make_plan(Request(layout=load_layout("fsdp"), table=table, devices=8, batch=8, length=16, engine="torch"))
    assert {row.name: str(row.at_rest) for row in plan.weights} == {
        "taps": "_taps embed",
        "heat": "",
        "up": "mlp/fsdp embed",
    }


def test_heads_in_a_merged_dim_are_not_split() -> None:
    shapes = {"q": ((64, 64), "float32")}
    names = {"q": "attention: heads embed"}
    layout = load_layout("tp")

    def codes(units: dict[str, int] | None) -> set[str]:
        table = table_of(shapes, names, units=units)
        request = Request(layout=layout, table=table, mesh_sizes={"tensor": 8}, batch=8, length=16, engine="torch")
        return {finding.code for finding in make_plan(request).errors}

    assert "SW107" not in codes(None)
    assert "SW107" in codes({"heads": 16})


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (
            {"heads": 48},
            "weight 'q' has 64 elements along 'heads', which units of 48 do not divide. Give the elements of one unit, as "
            "the width of a head.",
        ),
        ({"haeds": 16}, "units: no weight has a dim 'haeds'. Did you mean 'heads'?"),
    ],
)
def test_units_that_do_not_fit(units: dict[str, int], message: str) -> None:
    with pytest.raises(InputError) as caught:
        table_of({"q": ((64, 64), "float32")}, {"q": "attention: heads embed"}, units=units)
    assert str(caught.value) == message


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "fsdp": 4}])
def test_rows_are_sharded_in_components_without_listed_activations(sizes: dict[str, int]) -> None:
    request = Request(layout=load_layout("hsdp"), table=table_of(SHAPES, NAMES), mesh_sizes=sizes, batch=8, length=16)
    assert not [finding.text() for finding in make_plan(request).findings if finding.code == "SW103"]


def test_activations_are_planned_with_the_weights() -> None:
    table = table_of(SHAPES, NAMES, activations={"x": "residual: batch length embed"})
    plan = make_plan(Request(layout=load_layout("cp"), table=table, devices=8, batch=8, length=16))
    assert str(plan.by_name["x"].in_use) == "batch/data/fsdp length/context embed"
    assert plan.by_name["x"].bytes_per_device == (8 // 4) * (16 // 2) * 64 * 4


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"h/*/q": NAMES["h/*/q"]},
            "no pattern describes weight 'h/0/scale' of shape (64,). Known: h/*/q.",
        ),
        (
            {**NAMES, "h/0/*": "residual: norm"},
            "weight 'h/0/q' is described in 2 ways, by 'h/*/q', 'h/0/*'. Leave one.",
        ),
        (
            {**NAMES, "h/*/v": "attention: embed kv_heads head_dim"},
            "pattern 'h/*/v' matches no weight. Did you mean 'h/1/q'?",
        ),
        (
            {**NAMES, "h/*/q": "attention: embed heads"},
            "'h/*/q' names 2 dims (embed heads); weight 'h/0/q' has 3: (64, 4, 16).",
        ),
        (
            {**NAMES, "h/*/q": "atention: embed heads head_dim"},
            "'h/*/q': unknown component 'atention'. Did you mean 'attention'?",
        ),
        (
            {**NAMES, "h/*/q": "embed heads head_dim"},
            "'h/*/q': 'embed heads head_dim' is not 'component: dims', as in 'attention: embed heads head_dim'.",
        ),
        (
            {**NAMES, "h/*/q": "attention: embed layers head_dim"},
            "'h/*/q': 'layers' is first or absent; checkpoints and stages shard dim 0.",
        ),
    ],
    ids=["missing", "twice", "unused", "rank", "component", "no colon", "layers inside"],
)
def test_descriptions_that_do_not_fit(names: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        table_of(SHAPES, names)
    assert str(caught.value) == message


def test_a_misspelt_logical_axis_has_a_caret() -> None:
    with pytest.raises(NotationError) as caught:
        table_of(SHAPES, {**NAMES, "h/*/q": "attention: embed haeds head_dim"})
    assert str(caught.value) == (
        "no logical axis is called 'haeds'. Did you mean 'heads'?\n    embed haeds head_dim\n          ^^^^^"
    )


def test_a_description_has_no_mesh_axes() -> None:
    with pytest.raises(NotationError) as caught:
        table_of(SHAPES, {**NAMES, "h/*/q": "attention: embed heads/tensor head_dim"})
    assert str(caught.value) == (
        "'h/*/q': logical names only; the layout decides which mesh axes shard a dim\n"
        "    embed heads/tensor head_dim\n"
        "          ^^^^^^^^^^^^"
    )


def test_an_activation_of_unknown_size() -> None:
    with pytest.raises(InputError) as caught:
        table_of(SHAPES, NAMES, activations={"x": "mlp: batch length mlp"})
    assert str(caught.value) == (
        "activation 'x': the weights give 'mlp' no size, or several. "
        "Name a dim of a weight 'mlp', or leave the activation out."
    )


@pytest.mark.parametrize(
    ("component", "dims", "spec"),
    [
        ("residual", "batch length embed", "batch/data/fsdp length/expert embed"),
        ("attention", "batch kv_length kv_heads head_dim", "batch/data/fsdp kv_length kv_heads head_dim"),
        ("moe", "experts batch groups slots embed", "experts/expert batch/data/fsdp groups slots embed"),
        ("router", "batch groups scores slots embed", "batch/data/fsdp groups/expert scores slots embed"),
    ],
)
def test_one_activation_at_a_time(component: str, dims: str, spec: str) -> None:
    mesh = Mesh.of(data=1, fsdp=2, expert=4)
    assert str(activation_spec(load_layout("ep-as-cp"), mesh, dims, component=component)) == spec


def test_what_feeds_the_heads_has_its_gradient_reduced_over_them() -> None:
    """TorchTitan #4054: such a sum was missing, and the loss looked normal."""
    shapes = {"down": ((64, 16), "float32"), "norm": ((16,), "float32"), "bias": ((64,), "float32")}
    shapes |= {"q": ((64, 4, 16), "float32"), "router": ((64, 8), "float32")}
    names = {"down": "attention: embed q_lora", "norm": "attention: norm", "bias": "attention: embed"}
    names |= {"q": NAMES["h/*/q"], "router": "router: embed scores"}
    request = Request(layout=load_layout("tp"), table=table_of(shapes, names), devices=4, batch=4, length=16)
    summed = {row.name for row in make_plan(request).weights if "tensor" in row.gradient}
    assert summed == {"down", "norm", "router"}


def test_brackets_in_a_name_are_text() -> None:
    assert len(table_of({"h[0]?": ((64,), "float32")}, {"h[0]?": "residual: norm"}).weights) == 1


@pytest.mark.parametrize("given", [(64, 64), ((64, -1), "float32"), ((64, 0.5), "float32"), ((64,), 32), "weights"])
def test_what_is_no_shape_and_dtype_is_refused(given) -> None:
    with pytest.raises(InputError, match=r"^weight 'w' is given as .* Expected a shape and a dtype"):
        table_of({"w": given}, {"w": "mlp: embed mlp"})


def test_a_mesh_of_another_layout_is_refused() -> None:
    with pytest.raises(InputError, match=r"^the mesh has an axis 'a', and layout 'tp' has none\."):
        activation_spec(load_layout("tp"), Mesh.of(a=2), "batch length", component="residual")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch is 0, and must be a whole number of at least 1."),
        ({"length": 2.5}, "length is 2.5, and must be a whole number of at least 1."),
        ({"devices": -8}, "devices is -8, and must be a whole number of at least 1."),
        ({"microbatches": 0}, "microbatches is 0, and must be a whole number of at least 1."),
        ({"mesh_sizes": {"fsdp": "2"}}, "the size of mesh axis 'fsdp' is '2', and must be a whole number or 'auto'."),
        ({"engine": "tf"}, "engine is 'tf', and must be one of jax, torch."),
        (
            {"remat": "some"},
            "remat is 'some', and must be one of full, dots, none, or a policy. A policy is full, dots or none; or names of activations, "
            "as keep=attention.output,host=residual.stream; or several for some layers each, as full@0:16+none.",
        ),
        ({"dtype": "fp8"}, "dtype is 'fp8', and must be one of float32, bfloat16."),
        *(
            (
                {name: "float16"},
                f"{name} is 'float16'. Nothing trains in float16: gradients below 6e-8 are 0 in it and those above 65,504 "
                "infinite, unless the loss is scaled, and no engine scales it. Use 'bfloat16', which has as many bits and "
                "float32's range.",
            )
            for name in ("dtype", "weights_dtype", "moments_dtype")
        ),
    ],
)
def test_an_impossible_request_is_refused(options, message) -> None:
    given = {"layout": load_layout("fsdp"), "table": table_of(SHAPES, NAMES), "batch": 8, "length": 16}
    with pytest.raises(InputError) as caught:
        Request(**{**given, **options})
    assert str(caught.value) == message


FUSED = {
    **{f"blocks.{n}.attention.qkv.weight": ((192, 64), "float32") for n in range(3)},
    **{f"blocks.{n}.attention.qkv.bias": ((192,), "float32") for n in range(3)},
    **{f"blocks.{n}.attention.out.weight": ((64, 64), "float32") for n in range(3)},
}
NAMES_OF_FUSED = {
    "*qkv.weight": "attention: heads embed",
    "*qkv.bias": "attention: heads",
    "*out.weight": "attention: embed heads",
}


def found_in(shapes: dict[str, Any], names: dict[str, str], layout: str, engine: Any, **options: Any) -> list[Finding]:
    table = table_of(shapes, names, **options)
    sizes = {"tensor": 2} if layout == "tp" else {"fsdp": 2}
    request = Request(layout=load_layout(layout), table=table, mesh_sizes=sizes, batch=8, length=16, engine=engine)
    return [one for one in make_plan(request).findings if "several matrices" in one.found]


def test_several_matrices_in_one_dim_are_not_sharded_as_one() -> None:
    [warning] = found_in(FUSED, NAMES_OF_FUSED, "tp", "torch", units={"heads": 16})
    assert warning.severity == "warning"
    assert warning.text() == (
        "warning SW107: The axes of a dim divide it, in whole units: heads, KV heads, experts.\n"
        "  where  dim 0 ('heads') of blocks.0.attention.qkv.weight\n"
        "         heads/tensor embed\n"
        "         ^^^^^^^^^^^^\n"
        "  found  192 along 'heads', and 64 in blocks.0.attention.out.weight beside it: several matrices in one dim, as q, k and v. "
        "Over tensor 2 a device has 96 in a row, of the first matrix before the second; blocks.0.attention.qkv.weight and 2 more "
        "weights\n"
        "  needed its part of each matrix on each device: each as a weight of its own, or a dim of its own for them, as 'attention: "
        "_matrices heads embed'\n"
        "  fix    --mesh tensor=1,data=2\n"
        "  cost   its results are moved between devices in each layer"
    )
    assert not found_in(FUSED, NAMES_OF_FUSED, "fsdp", "torch", units={"heads": 16})
    assert len(found_in(FUSED, NAMES_OF_FUSED, "tp", "jax", units={"heads": 16})) == 1


def test_the_fused_weight_that_parallelize_shards_by_heads() -> None:
    shapes = {key.replace("qkv.weight", "in_proj_weight"): value for key, value in FUSED.items()}
    names = {**NAMES_OF_FUSED, "*in_proj_weight": NAMES_OF_FUSED["*qkv.weight"]}
    del names["*qkv.weight"]
    assert not found_in(shapes, names, "tp", "torch", units={"heads": 16})
    assert found_in(shapes, names, "tp", "jax", units={"heads": 16})


def test_drawn_modules_with_and_without_fused_matrices() -> None:
    """Towers of other widths stand side by side: only a weight whose own module has a shorter dim is fused."""
    draw = random.Random(35)
    for _ in range(40):
        shapes: dict[str, Any] = {}
        fused, separator = set(), draw.choice("./")
        for tower in draw.sample(["text", "vision", "audio", "depth"], draw.randint(1, 3)):
            width, heads = draw.choice([32, 64, 96]), draw.choice([2, 4, 8]) * 16
            for block in range(draw.randint(1, 2)):
                inside = draw.choice([["blocks", str(block)], [f"layer{block}"]])
                prefix = separator.join([tower, *inside, "attention", ""])
                shapes[f"{prefix}out{separator}weight"] = ((width, heads), "float32")
                if draw.random() < 0.5:
                    key = prefix + draw.choice([f"qkv{separator}weight", "in_weight"])
                    shapes[key] = ((heads + draw.choice([32, 2 * heads]), width), "float32")
                    fused.add(key)
                else:
                    shapes.update({f"{prefix}{one}{separator}weight": ((heads, width), "float32") for one in "qkv"})
        names = {key: "attention: embed heads" if "out" in key else "attention: heads embed" for key in shapes}
        found = {re.split(" ", one.where)[-1] for one in found_in(shapes, names, "tp", draw.choice(["jax", "torch"]))}
        assert found <= fused
        assert bool(found) == bool(fused)
