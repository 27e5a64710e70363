"""The resolution of rules, held against Flax itself: Linen's and NNX's, over lists that nobody wrote."""

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


def random_rules(chance: random.Random) -> list[Rule]:
    """Up to 27 lines over few names and axes, so that most lists clash, fall back, repeat and stop at an empty line."""
    return [
        rule(chance.choice(NAMES), *chance.sample(AXES, chance.choice((0, 1, 1, 2, 2, 3))))
        for _ in range(chance.randrange(28))
    ]


def random_names(chance: random.Random) -> list[str | None]:
    names: list[str | None] = [*chance.sample(NAMES, chance.randrange(1, 7))]
    return [None if chance.random() < 0.15 else name for name in names]


def for_flax(rules: list[Rule], chance: random.Random) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """The same list as Flax takes it: one axis as text or as a tuple, none as None or an empty tuple."""

    def axes(line: Rule) -> str | tuple[str, ...] | None:
        if not line.axes:
            return chance.choice((None, ()))
        return line.axes[0] if len(line.axes) == 1 and chance.random() < 0.5 else line.axes

    return tuple((line.name, axes(line)) for line in rules)


def as_tuples(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    return tuple(() if cut is None else (cut,) if isinstance(cut, str) else tuple(cut) for cut in spec)


def test_linen_is_flax_linen():
    chance = random.Random(2)
    refused = fallen_back = ended = 0
    for _ in range(LISTS):
        rules, names = random_rules(chance), random_names(chance)
        found = resolve(names, rules)
        expected = logical_to_mesh_axes(tuple(names), for_flax(rules, chance))
        assert expected is not None
        assert found.axes == as_tuples(expected), (names, list(map(str, rules)))
        refused += bool(found.refused)
        fallen_back += any(line and line.name == no.rule.name for no in found.refused for line in found.obeyed)
        ended += any(line is not None and not line.axes for line in found.obeyed)
    # The lists are not tame: each turn that the algorithm knows was taken often.
    assert refused > LISTS / 3
    assert fallen_back > LISTS / 10
    assert ended > LISTS / 5


def test_nnx_is_flax_nnx():
    chance = random.Random(3)
    for _ in range(LISTS):
        rules, names = random_rules(chance), random_names(chance)
        spec = apply_rules(tuple(names), for_flax(rules, chance))
        # Without any rule Flax returns the names as they are.
        assert resolve_nnx(names, rules) == as_tuples(spec), (names, list(map(str, rules)))


def test_a_name_twice_in_a_tensor_is_refused_by_both():
    with pytest.raises(ValueError, match="occur more than once"):
        logical_to_mesh_axes(("embed", "embed"), (("embed", "fsdp"),))
    with pytest.raises(InputError) as refused:
        resolve(["embed", "embed"], [rule("embed", "fsdp")])
    assert str(refused.value) == "logical name 'embed' stands twice in one tensor: embed, embed."


@pytest.mark.parametrize(
    ("names", "rules", "axes"),
    [
        # An earlier line wins, whichever dim stands first.
        (("embed", "q_lora"), [rule("q_lora", "fsdp", "expert"), rule("embed", "fsdp")], ((), ("fsdp", "expert"))),
        # A clash over an axis is a clash whatever its size will be.
        (("a", "b"), [rule("a", "context", "fsdp"), rule("b", "context", "tensor")], (("context", "fsdp"), ())),
        # The next line of the same name is a fallback.
        (
            ("a", "b"),
            [rule("a", "x"), rule("b", "x", "y"), rule("b", "y")],
            (("x",), ("y",)),
        ),
        # Moved to the end, the same line loses.
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
