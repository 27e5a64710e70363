"""Norms of gradients on several meshes are those of one process."""

from __future__ import annotations

import pytest

from tests.engine_torch.own_norms import drawn, mixed
from tests.engine_torch.ranks import Ranks, one_answer

DRAWS = (0, 1, 2, 3)


@pytest.mark.parametrize("seed", [*DRAWS, *(pytest.param(each, marks=pytest.mark.matrix) for each in range(4, 100))])
def test_every_element_counts_once(eight: Ranks, seed: int) -> None:
    ranks = eight.run(drawn, seed)
    assert len({norms.ours for norms in ranks}) == 1
    for norms in ranks:
        assert abs(norms.ours / norms.needed - 1) < 1e-6
        assert norms.most_apart < 1e-6
        # Over each dim once: copies, data, model, replicas, experts.
        assert norms.reductions <= 5


@pytest.mark.parametrize(("recipe", "num_codes"), [(None, 0), ("fp8-row", 10), ("fp8-current", 5)])
def test_modules_beside_pytorchs_own_are_clipped_as_in_one_process(
    four: Ranks, one: Ranks, recipe: str | None, num_codes: int
) -> None:
    (norm, after, codes), (needed, *_) = one_answer(four.run(mixed, recipe)), one_answer(one.run(mixed, recipe))
    assert codes == num_codes
    assert abs(norm / needed - 1) < (1e-5 if recipe is None else 1e-3)
    assert abs(after / 0.01 - 1) < 1e-3
