"""The order of axes on the pieces of a row: what a device dispatches is of the tokens that it has."""

from __future__ import annotations

from itertools import permutations

import pytest

from shardwright.core.boxes.boxes import owned_boxes
from tests.core.test_collectives import BATCH, LENGTH, found, plan_of

ROLES = {
    "whole": "{elsewhere: tensor, moe: expert}",
    "cut": "{elsewhere: context, moe: expert}",
    "late": "{elsewhere: fsdp, router: context, moe: expert}",
}


@pytest.mark.parametrize("axes", list(permutations(ROLES)))
def test_a_devices_pieces_of_a_row_lie_in_its_own_part_of_it(axes: tuple[str, ...]) -> None:
    text = f"name: mine\nmesh: {{{', '.join(f'{axis}: 2' for axis in axes)}}}\nroles:\n"
    plan = plan_of("mixtral-test", text + "".join(f"  {axis}: {ROLES[axis]}\n" for axis in axes), {})
    rows = plan.by_name
    held = owned_boxes(rows["router.input"].in_use, plan.mesh, (BATCH, LENGTH, 1))
    # The pieces come one after the other along the row, each of as many tokens.
    pieces = owned_boxes(rows["router.grouped"].in_use, plan.mesh, (BATCH, LENGTH, 1, 1))
    for (whole,), (part,) in zip(held, pieces, strict=True):
        inside = all(whole.start[d] <= part.start[d] and part.stop[d] <= whole.stop[d] for d in (0, 1))
        assert inside, (str(rows["router.input"].in_use), str(rows["router.grouped"].in_use))
        assert whole.size == 2 * part.size
    assert found(plan, component="router", phase="forward", tensors=("router.grouped",)) == []


@pytest.mark.parametrize(
    ("elsewhere", "cut"),
    [
        # Rows that are a device's own stay so, and its part of a row is a piece.
        ("fsdp", "batch/expert groups"),
        ("context", "batch groups/expert"),
        # Of tokens that every device has, each takes its share.
        ("tensor", "batch groups/expert"),
    ],
)
def test_tokens_stay_where_the_experts_weights_travel(elsewhere: str, cut: str) -> None:
    role = f"{{elsewhere: {elsewhere}, moe: expert}}"
    text = f"name: mine\nmesh: {{expert: 4}}\nmove: {{moe: weights}}\nroles:\n  expert: {role}\n"
    plan = plan_of("mixtral-test", text, {})
    rows = plan.by_name
    assert str(rows["router.grouped"].in_use) == f"{cut} tokens embed"
    assert str(rows["moe.dispatched"].in_use) == f"experts {cut} slots embed"
    assert found(plan, kind="all-to-all") == []
