"""Degrees above the maximum, and findings on the layout: each has its position in the user's file."""

from __future__ import annotations

import pytest

from shardwright import FindingsError
from shardwright.interop.torchtitan.importing import TorchTitanRequest, import_torchtitan


@pytest.mark.parametrize(
    ("text", "where", "found", "fix"),
    [
        (
            "data_parallel_shard_degree = 10000000000000\n",
            "a.toml:2:1: 'data_parallel_shard_degree'",
            "degree 10,000,000,000,000",
            "Give a smaller degree.",
        ),
        (
            "expert_parallel_degree = 1048577\n",
            "a.toml:2:1: 'expert_parallel_degree'",
            "degree 1,048,577",
            "Give a smaller degree.",
        ),
        (
            "data_parallel_shard_degree = 32768\ntensor_parallel_degree = 32768\n",
            "a.toml:2:1: the degrees whose product is the world size",
            "dp_shard 32768 x tp 32768 = 1,073,741,824 ranks",
            "Give fewer ranks.",
        ),
        (
            "context_parallel_degree = 32768\ntensor_parallel_degree = 32768\n",
            "a.toml:2:1: the degrees whose product is the world size",
            "cp 32768 x tp 32768 = 1,073,741,824 ranks",
            "Give fewer ranks.",
        ),
        (
            "tensor_parallel_degree = 3\nexpert_parallel_degree = 1048576\n",
            "a.toml:2:1: the degrees whose product is the world size",
            "tp 3, with the dp_shard that ep 1048576 needs = 3,145,728 ranks",
            "Give fewer ranks.",
        ),
    ],
)
def test_degrees_above_the_maximum_are_a_finding_at_their_position(text, where, found, fix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(f"[parallelism]\n{text}")
    with pytest.raises(FindingsError) as refused:
        import_torchtitan(TorchTitanRequest(file="a.toml", name="a"))
    (finding,) = refused.value.findings
    assert (finding.code, finding.place, finding.found, finding.needed, finding.fix) == (
        "SW106",
        where,
        found,
        "at most 1,048,576",
        fix,
    )


def test_a_finding_on_the_layout_has_its_place_in_the_users_file(tmp_path, monkeypatch):
    """The layout has no file of its own yet."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("[parallelism]\ndata_parallel_shard_degree = 2\npipeline_parallel_degree = 2\n")
    found = import_torchtitan(TorchTitanRequest(file="a.toml", name="a", model="llama3-test", batch=2))
    places = {str(finding.position) for finding in found.findings if finding.position is not None}
    assert places == {"a.toml:3:1"}
