"""A user's own weights as a table, and every description that is refused."""

from __future__ import annotations

import pytest

from shardwright import InputError, Mesh, NotationError, Request, activation_spec, load_layout, make_plan, table_of

SHAPES = {
    "h/0/q": ((64, 4, 16), "float32"),
    "h/1/q": ((64, 4, 16), "float32"),
    "h/0/scale": ((64,), "float32"),
    "h/1/scale": ((64,), "float32"),
}
NAMES = {"h/*/q": "attention: embed heads head_dim", "h/*/scale": "residual: norm"}


def test_weights_rest_as_those_of_our_own_models_do() -> None:
    table = table_of(SHAPES, NAMES)
    plan = make_plan(Request(layout=load_layout("fsdp-tp"), table=table, devices=8, batch=8, length=16))
    assert {row.name: (str(row.at_rest), str(row.in_use)) for row in plan.weights} == {
        "h/0/q": ("embed/fsdp heads/tensor head_dim", "embed heads/tensor head_dim"),
        "h/1/q": ("embed/fsdp heads/tensor head_dim", "embed heads/tensor head_dim"),
        "h/0/scale": ("norm", "norm"),
        "h/1/scale": ("norm", "norm"),
    }


def test_stacked_layers_are_one_row() -> None:
    table = table_of({"q": ((12, 64, 4, 16), "bfloat16")}, {"q": "attention: layers embed heads head_dim"})
    (weight,) = table.weights
    assert (weight.num, weight.stack, weight.shape, weight.dtype) == (12, "layers", (64, 4, 16), "bfloat16")


def test_a_dim_with_an_underscore_is_never_cut() -> None:
    table = table_of({"taps": ((8, 64), "float32")}, {"taps": "mlp: _taps embed"})
    plan = make_plan(Request(layout=load_layout("fsdp"), table=table, devices=8, batch=8, length=16))
    assert str(plan.weights[0].at_rest) == "_taps embed/fsdp"


def test_activations_are_planned_beside_the_weights() -> None:
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
            "'h/*/q': 'layers' stands first or not at all; the store and the stages cut dim 0.",
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
        "'h/*/q': logical names only; which mesh axes cut a dim is the layout's to say\n"
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
