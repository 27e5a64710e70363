"""The resolution of rules compared with Flax, for Linen and NNX, over random lists."""

from __future__ import annotations

import random

import pytest
from flax.core.spmd import apply_rules
from flax.linen import logical_to_mesh_axes
from jax.sharding import PartitionSpec

from shardwright import InputError
from shardwright.interop.maxtext.reading.rules import Rule, rule
from shardwright.interop.maxtext.resolution.flax_resolution import resolve, resolve_nnx

LISTS = 4000
NAMES = ("batch", "length", "embed", "mlp", "heads", "experts", "vocab", "norm")
AXES = ("data", "fsdp", "fsdp_transpose", "context", "tensor", "expert")


def random_rules(rng: random.Random) -> list[Rule]:
    """Up to 27 rules over few names and axes, so that most lists have conflicts, fallbacks, repeats and rules without axes."""
    return [
        rule(rng.choice(NAMES), *rng.sample(AXES, rng.choice((0, 1, 1, 2, 2, 3)))) for _ in range(rng.randrange(28))
    ]


def random_names(rng: random.Random) -> list[str | None]:
    names: list[str | None] = [*rng.sample(NAMES, rng.randrange(1, 7))]
    return [None if rng.random() < 0.15 else name for name in names]


def for_flax(rules: list[Rule], rng: random.Random) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """The same list as Flax takes it: one axis as text or as a tuple, none as None or an empty tuple."""

    def axes(line: Rule) -> str | tuple[str, ...] | None:
        if not line.axes:
            return rng.choice((None, ()))
        return line.axes[0] if len(line.axes) == 1 and rng.random() < 0.5 else line.axes

    return tuple((line.name, axes(line)) for line in rules)


def as_tuples(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    return tuple(() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec)


def test_linen_is_flax_linen():
    rng = random.Random(2)
    refused = with_fallback = stopped = 0
    for _ in range(LISTS):
        rules, names = random_rules(rng), random_names(rng)
        found = resolve(names, rules)
        expected = logical_to_mesh_axes(tuple(names), for_flax(rules, rng))
        assert expected is not None
        assert found.axes == as_tuples(expected), (names, list(map(str, rules)))
        refused += bool(found.skipped)
        with_fallback += any(line and line.name == each.rule.name for each in found.skipped for line in found.applied)
        stopped += any(line is not None and not line.axes for line in found.applied)
    # Each branch of the algorithm was taken often.
    assert refused > LISTS / 3
    assert with_fallback > LISTS / 10
    assert stopped > LISTS / 5


def test_nnx_is_flax_nnx():
    rng = random.Random(3)
    for _ in range(LISTS):
        rules, names = random_rules(rng), random_names(rng)
        spec = apply_rules(tuple(names), for_flax(rules, rng))
        # Without any rule Flax returns the names as they are.
        assert resolve_nnx(names, rules) == as_tuples(spec), (names, list(map(str, rules)))


def test_a_name_twice_in_a_tensor_is_refused_by_both():
    with pytest.raises(ValueError, match="occur more than once"):
        logical_to_mesh_axes(("embed", "embed"), (("embed", "fsdp"),))
    with pytest.raises(InputError) as refused:
        resolve(["embed", "embed"], [rule("embed", "fsdp")])
    assert str(refused.value) == "logical name 'embed' is twice in one tensor: embed, embed."


@pytest.mark.parametrize(
    ("names", "rules", "axes"),
    [
        # An earlier rule wins, whichever dim is first.
        (("embed", "q_lora"), [rule("q_lora", "fsdp", "expert"), rule("embed", "fsdp")], ((), ("fsdp", "expert"))),
        # A conflict over an axis is a conflict for any size of the axis.
        (("a", "b"), [rule("a", "context", "fsdp"), rule("b", "context", "tensor")], (("context", "fsdp"), ())),
        # The next rule of the same name is a fallback.
        (
            ("a", "b"),
            [rule("a", "x"), rule("b", "x", "y"), rule("b", "y")],
            (("x",), ("y",)),
        ),
        # Moved to the end, the same rule loses.
        (
            ("exp", "batch"),
            [rule("exp", "expert"), rule("batch", "data", "expert")],
            (("expert",), ()),
        ),
    ],
)
def test_what_linen_does(names, rules, axes):
    assert resolve(names, rules).axes == axes
    assert as_tuples(logical_to_mesh_axes(names, tuple((line.name, line.axes) for line in rules)) or ()) == axes
