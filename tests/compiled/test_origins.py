"""Names of operations as JAX writes them, and as compilers merge them: phase, component, tensors."""

from __future__ import annotations

import pytest

from shardwright.compiled.text.origins import NOWHERE, Origin, Sources, merged, origins_of

IN_LAYER = "jit(step)/transpose(jvp())/while/body/closed_call/checkpoint"
CASES = {
    "jit(step)/jvp()/while/body/closed_call/component=attention/tensor=layers.attention.q/all_gather": Origin(
        component="attention", phase="forward", tensors=("layers.attention.q",), operation="all_gather"
    ),
    "jit(step)/transpose(jvp(component=attention))/tensor=layers.attention.q/reduce_scatter": Origin(
        component="attention", phase="backward", tensors=("layers.attention.q",), operation="reduce_scatter"
    ),
    f"{IN_LAYER}/rematted_computation/component=mlp/bld,df->blf/dot_general": Origin(
        component="mlp", phase="recompute", operation="dot_general"
    ),
    "jit(step)/jvp(component=embedding)/component=residual/tensor=a/tensor=residual.stream/psum": Origin(
        component="residual", phase="forward", tensors=("residual.stream",), operation="psum"
    ),
    "jit(step)/component=logits/transpose": Origin(component="logits", phase="update", operation="transpose"),
    "jit(step)/reduce_sum": Origin(phase="update", operation="reduce_sum"),
    "state.weights['layers.attention.q']": NOWHERE,
}


@pytest.mark.parametrize(("name", "origin"), CASES.items(), ids=CASES)
def test_one_operation(name: str, origin: Origin) -> None:
    assert origins_of(name) == (origin,)


def test_merged_operations_have_separate_origins() -> None:
    name = (
        f"{IN_LAYER}/(component=mlp/tensor=down/all_gather:"
        "rematted_computation/(component=mlp/tensor=up/all_gather:component=attention/all_gather))"
    )
    found = origins_of(name)
    assert [(one.component, one.phase, one.tensors) for one in found] == [
        ("mlp", "backward", ("down",)),
        ("mlp", "recompute", ("up",)),
        ("attention", "recompute", ()),
    ]
    assert merged(found) == Origin(tensors=("down", "up"), operation="all_gather")
    assert merged(found[:2]).component == "mlp"


def test_several_names() -> None:
    first, second = origins_of("jit(f)/jvp()/component=moe/mul;component=residual/tensor=x/broadcast_in_dim")
    assert (first.component, first.phase, first.operation) == ("moe", "forward", "mul")
    assert (second.component, second.phase, second.tensors) == ("residual", "forward", ("x",))


def test_colons_and_parentheses_that_separate_nothing() -> None:
    (one,) = origins_of("jit(f)/vmap(jit(take(x)))/slice:3/component=moe/gather")
    assert (one.component, one.operation) == ("moe", "gather")


TABLES = {
    "FileNames": (
        '1 "/venv/lib/python3.11/site-packages/optax/tree.py"',
        '2 "/home/me/src/mine/step.py"',
        '3 "/x/a.py"',
    ),
    "FunctionNames": ('1 "step"',),
    "FileLocations": tuple(
        f"{number} {{file_name_id={number} function_name_id=1 line={number}0 end_line=99 column=1}}"
        for number in (1, 2, 3)
    ),
    "StackFrames": tuple(
        f"{number + 4} {{file_location_id={number} parent_frame_id={number + 4}}}" for number in (1, 2, 3)
    ),
}


@pytest.mark.parametrize(
    ("metadata", "line"),
    [
        ("stack_frame_id=5", "optax/tree.py:10"),
        ("stack_frame_id=6", "mine/step.py:20"),
        ("stack_frame_id=7", "/x/a.py:30"),
        ("stack_frame_id=8", None),
        ('source_file="/home/me/src/mine/loss.py" source_line=41', "mine/loss.py:41"),
        ('op_name="jit(f)/add"', None),
    ],
)
def test_lines_of_source(metadata: str, line: str | None) -> None:
    """The innermost frame; the part of the file name that does not depend on the machine."""
    assert Sources.of(TABLES).of_instruction(f"%x), metadata={{{metadata}}}") == line
