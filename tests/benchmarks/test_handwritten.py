"""The handwritten steps compute the same as ours, without which their times cannot be compared."""

from __future__ import annotations

import pytest

from benchmarks.agreement import disagreement
from benchmarks.cases import Case, handwritten, ours
from benchmarks.timing import ratio, take_turns
from tests.matrix import some

TINY = "num_layers=1,embed=32,vocab=64"
CASES = [
    Case(
        model="llama3-test", layout="fsdp-tp", mesh="fsdp=2,tensor=2", rows=4, length=16, set=f"{TINY},num_kv_heads=4"
    ),
    Case(
        model="mixtral-test",
        layout="ep",
        mesh="fsdp=1,expert=2",
        rows=2,
        length=16,
        set=f"{TINY},mlp=32,capacity_factor=1.0",
    ),
    Case(
        model="deepseek3-test",
        layout="ep",
        mesh="fsdp=1,expert=2",
        rows=2,
        length=16,
        set="num_layers=2,embed=32,vocab=64,mlp=32,expert_mlp=16",
    ),
]


@pytest.mark.parametrize("case", some(CASES, (0, 1)), ids=lambda case: case.model)
def test_both_steps_lose_alike(case: Case) -> None:
    assert disagreement(ours(case), handwritten(case)) <= 1e-5


def test_a_ratio_is_taken_block_by_block() -> None:
    found = ratio((1.0, 4.0, 9.0), (1.0, 2.0, 3.0))
    assert (found.middle, str(found)) == (2.0, "2.00 (1.00 to 3.00)")


def test_steps_take_turns() -> None:
    calls: list[str] = []
    times = take_turns({name: (lambda name=name: calls.append(name)) for name in "ab"}, blocks=2, block_s=0.0)
    assert "".join(calls) == "aabb" + "ab" + "ba"
    assert len(times["a"].cpu_s) == len(times["b"].wall_s) == 2
