"""The reader of compiled collectives, which other tests trust: worked by hand, in every form that XLA writes."""

from __future__ import annotations

import pytest

from shardwright.core.mesh import Mesh
from tests.engine_jax.compiled_text import Collective, Result, axes_of, collectives, replica_groups

EXPERT, FSDP = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]
GROUPS = {
    "{{0,1,2,3},{4,5,6,7}}": EXPERT,
    "{{0,4},{1,5},{2,6},{3,7}}": FSDP,
    "{}": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "[2,4]<=[8]": EXPERT,
    "[4,2]<=[2,4]T(1,0)": FSDP,
    "[2,4]<=[4,2]T(1,0)": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "mesh['axis_0'=2,'axis_1'=4] {'axis_1'}": EXPERT,
    "mesh['axis_0'=2,'axis_1'=4] {'axis_0'}": FSDP,
    "mesh['axis_0'=8,'axis_1'=1] {'axis_0'}": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}": FSDP,
}


@pytest.mark.parametrize(("text", "groups"), GROUPS.items(), ids=GROUPS)
def test_groups(text: str, groups: list[list[int]]) -> None:
    assert replica_groups(f"(%x), channel_id=3, replica_groups={text}, dimensions={{0}}", 8) == groups


def test_axes() -> None:
    mesh = Mesh.of(data=1, fsdp=2, expert=4)
    assert axes_of(EXPERT, mesh) == ("expert",)
    assert axes_of(FSDP, mesh) == ("fsdp",)
    assert axes_of([[0, 1, 2, 3, 4, 5, 6, 7]], mesh) == ("fsdp", "expert")
    with pytest.raises(AssertionError, match="no axes"):
        axes_of([[0, 1], [2, 3], [4, 5], [6, 7]], mesh)


def test_a_program_is_read_line_by_line() -> None:
    text = """
  %a = f32[4,32,80]{2,1,0} all-gather(%b), channel_id=1, replica_groups=[2,4]<=[8], dimensions={1}
  %c = (f32[4,2]{1,0}, /*index=1*/s32[]) all-reduce-start(%d, %e), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%f
  %g = f32[2]{0} collective-permute(%h), channel_id=2, source_target_pairs={{0,1},{1,0}}
  %i = f32[2]{0} add(%all-gather, %j)
"""
    assert collectives(text, Mesh.of(fsdp=2, expert=4)) == [
        Collective("all-gather", ("expert",), (Result("f32", (4, 32, 80)),)),
        Collective("all-reduce", ("fsdp",), (Result("f32", (4, 2)), Result("s32", ()))),
        Collective("collective-permute", (), (Result("f32", (2,)),)),
    ]
