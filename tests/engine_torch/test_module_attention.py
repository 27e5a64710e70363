"""Attention of users' own programs: drawn masks, windows, lengths and formats, in one process and under context parallelism."""

from __future__ import annotations

import pytest

from tests.engine_torch.attention_cases import KINDS, difference_of_call, drawn_case
from tests.engine_torch.own_attention import UNMASKED, differences
from tests.engine_torch.ranks import Ranks
from tests.matrix import rest

BOUND = 1e-5


@pytest.mark.parametrize("seeds", [range(40), rest(range(40, 1000))], ids=["some", "many"])
def test_drawn_calls_are_those_of_one_head_after_another(seeds: range) -> None:
    cases = {seed: drawn_case(seed) for seed in seeds}
    assert {case.kind for case in cases.values()} == set(KINDS)
    for seed, case in cases.items():
        assert difference_of_call(case, checkpoint_core_attention=seed % 2 == 0) < BOUND, case


@pytest.mark.parametrize("communication", ["all_gather", "p2p", "a2a"])
@pytest.mark.parametrize(
    ("ranks", "seeds"), [(2, range(12)), (4, range(12)), rest(2, range(12, 150)), rest(4, range(12, 150))]
)
def test_context_parallelism_computes_what_one_process_does(
    four: Ranks, communication: str, ranks: int, seeds: range
) -> None:
    for rank, found in enumerate(four.first(ranks).run(differences, seeds, communication)):
        for seed, difference in zip(seeds, found, strict=True):
            assert difference < BOUND, (rank, drawn_case(seed, ranks, UNMASKED))
