"""The order of axes on the groups of a row: a device dispatches tokens that it has."""

from __future__ import annotations

from itertools import permutations

import pytest

from shardwright.core.boxes.boxes import owned_boxes
from tests.core.test_collectives import BATCH, LENGTH, found, plan_of

ROLES = {
    "replicated": "{elsewhere: tensor, moe: expert}",
    "sharded": "{elsewhere: context, moe: expert}",
    "late": "{elsewhere: fsdp, router: context, moe: expert}",
}


@pytest.mark.parametrize("axes", list(permutations(ROLES)))
def test_a_devices_groups_of_a_row_are_inside_its_shard_of_it(axes: tuple[str, ...]) -> None:
    text = f"name: mine\nmesh: {{{', '.join(f'{axis}: 2' for axis in axes)}}}\nroles:\n"
    plan = plan_of("mixtral-test", text + "".join(f"  {axis}: {ROLES[axis]}\n" for axis in axes), {})
    rows = plan.by_name
    held = owned_boxes(rows["router.input"].in_use, plan.mesh, (BATCH, LENGTH, 1))
    # The groups follow each other along the row, each of as many tokens.
    groups = owned_boxes(rows["router.grouped"].in_use, plan.mesh, (BATCH, LENGTH, 1, 1))
    for (shard,), (group,) in zip(held, groups, strict=True):
        inside = all(shard.start[d] <= group.start[d] and group.stop[d] <= shard.stop[d] for d in (0, 1))
        assert inside, (str(rows["router.input"].in_use), str(rows["router.grouped"].in_use))
        assert shard.size == 2 * group.size
    assert found(plan, component="router", phase="forward", tensors=("router.grouped",)) == []


@pytest.mark.parametrize(
    ("elsewhere", "dims"),
    [
        # Sharded rows stay sharded, and a shard of a row is a group.
        ("fsdp", "batch/expert groups"),
        ("context", "batch groups/expert"),
        # Of tokens that are replicated, each device takes its share.
        ("tensor", "batch groups/expert"),
    ],
)
def test_tokens_are_not_sent_where_the_experts_weights_are_gathered(elsewhere: str, dims: str) -> None:
    role = f"{{elsewhere: {elsewhere}, moe: expert}}"
    text = f"name: mine\nmesh: {{expert: 4}}\nmove: {{moe: weights}}\nroles:\n  expert: {role}\n"
    plan = plan_of("mixtral-test", text, {})
    rows = plan.by_name
    assert str(rows["router.grouped"].in_use) == f"{dims} tokens embed"
    assert str(rows["moe.dispatched"].in_use) == f"experts {dims} slots embed"
    assert found(plan, kind="all-to-all") == []
