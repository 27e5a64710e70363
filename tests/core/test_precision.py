"""The table of dtypes: complete, and the plan's bytes follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from shardwright import Plan, Request, load_layout, make_plan, model_table
from shardwright.core.model import precision
from shardwright.core.model.precision import PRECISION, Word, dtype_of, own_dtype
from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.plan.resharding import moves_of_weight, reshardings_of_weight, update_of_weight

DEVICE_SIDE = ("loss", "clipping")
"""Rows that are sent and summed and not in the plan: single numbers, and two for each token."""


def plan_of(engine: str, **options: str) -> Plan:
    request = Request(
        layout=replace(load_layout("ep"), move_moe="ring"),
        table=model_table("mixtral-test"),
        mesh_sizes={"fsdp": 2, "expert": 2},
        batch=8,
        length=32,
        engine=engine,  # pyright: ignore[reportArgumentType]
        **{"dtype": "bfloat16", **options},  # pyright: ignore[reportArgumentType]
    )
    return make_plan(request)


def bytes_of(plan: Plan, tensor: str, phase: str) -> int:
    return sum(
        row.bytes_per_device * row.count_per_step
        for row in plan.collectives
        if tensor in row.tensors and row.phase == phase
    )


def test_what_is_summed_is_sent() -> None:
    assert all((row.summed is None) or (row.sent is not None) for row in PRECISION.values())


def test_nothing_that_decides_the_loss_is_narrow() -> None:
    """Statistics of norms, scores, routing, the loss, sums over tokens, and all that is done to a weight."""
    narrow = [name for name, row in PRECISION.items() if row.computed == "computation"]
    assert narrow == ["stream"]
    assert {name for name, row in PRECISION.items() if row.kept == "float32"} == {
        "scores",
        "router",
        "logits",
        "loss",
        "clipping",
    }


@pytest.fixture
def forget() -> Iterator[Callable[[], None]]:
    """Forgets what followed from the table of dtypes, now and after the test."""

    def clear() -> None:
        for remembered in (reshardings_of_weight, update_of_weight, moves_of_weight):
            remembered.cache_clear()

    yield clear
    clear()


@pytest.mark.parametrize("engine", ["jax", "torch"])
@pytest.mark.parametrize(
    ("row", "column", "word", "tensor", "phase", "share"),
    [
        # A weight that is gathered in its dtype at rest is twice the bytes; a gradient that is summed narrow, half.
        ("weight", "sent", "at rest", "layers.moe.gate", "forward", 2.0),
        ("gradient", "summed", "in use", "layers.moe.gate", "backward", 0.5),
    ],
)
def test_the_bytes_of_the_plan_are_the_tables(
    engine: str,
    row: str,
    column: str,
    word: Word,
    tensor: str,
    phase: str,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
    forget: Callable[[], None],
) -> None:
    before = bytes_of(plan_of(engine), tensor, phase)
    changed = replace(PRECISION[row], **{column: word})
    monkeypatch.setattr(precision, "PRECISION", {**PRECISION, row: changed})
    forget()
    assert bytes_of(plan_of(engine), tensor, phase) == share * before > 0


def test_activations_of_their_own_dtype_are_the_tables() -> None:
    plan = plan_of("jax")
    routed = own_dtype(PRECISION["router"].kept)
    own = {"logits.scores": own_dtype(PRECISION["logits"].kept)}
    own |= {f"router.{name}": routed for name in ("scores", "chosen", "weights")}
    for row in plan.activations:
        if row.dtype in ("float32", "bfloat16"):
            assert row.dtype == own.get(row.name, "bfloat16"), row.name
    assert plan.request.table.weight("layers.router.kernel").in_use_dtype == PRECISION["router"].computed


def test_every_word_has_a_dtype() -> None:
    known = {"computation": "bfloat16", "in_use": "bfloat16", "at_rest": "float32"}
    known |= {"gradients": "float32", "moments": "float32"}
    for row in PRECISION.values():
        for word in (row.computed, row.kept, row.sent, row.summed):
            assert word is None or dtype_of(word, **known) in DTYPE_BYTES


def test_a_word_whose_dtype_is_not_known_fails_an_assertion() -> None:
    with pytest.raises(AssertionError):
        dtype_of("at rest", computation="bfloat16")
