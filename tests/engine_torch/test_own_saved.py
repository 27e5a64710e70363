"""A user's own module, saved under one sharding and loaded under another: each rank holds what PyTorch itself gives it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardwright.checkpoint import open_newest, verify
from tests.engine_torch.own_saved import Sharding, load_small, numbered, save_small, save_small_in_background
from tests.engine_torch.ranks import Ranks
from tests.matrix import some

SHARDINGS: tuple[Sharding, ...] = (
    ("replicated", (1,)),
    ("replicated", (2,)),
    ("fsdp", (3,)),
    ("fsdp", (2, 2)),
    ("tp", (4,)),
    ("fsdp-tp", (2, 2)),
    ("fsdp-tp", (3, 2)),
    ("fsdp-tp", (2, 2, 2)),
    ("fsdp-tp", (2, 3)),
)
PAIRS = [(before, after) for before in SHARDINGS for after in SHARDINGS]


def of(eight: Ranks, sizes: tuple[int, ...]) -> Ranks:
    return eight.first(int(np.prod(sizes)))


# The pairs below save under the others.
@pytest.mark.parametrize("sharding", some(SHARDINGS, (1, 2, 3, 4, 8)), ids=str)
def test_a_save_has_every_element_once(eight: Ranks, sharding: Sharding, tmp_path: Path) -> None:
    of(eight, sharding[1]).run(save_small, *sharding, str(tmp_path))
    checkpoint = open_newest(tmp_path)
    assert verify(tmp_path)["ok"]
    for name, weight in numbered().named_parameters():
        found, needed = checkpoint.read_box(name), weight.detach().numpy()
        np.testing.assert_array_equal(found, needed, err_msg=name)
        np.testing.assert_allclose(checkpoint.read_box(f"optimizer.exp_avg/{name}"), needed * 0.1, rtol=1e-6)
        np.testing.assert_allclose(checkpoint.read_box(f"optimizer.exp_avg_sq/{name}"), needed**2 * 0.001, rtol=1e-5)
    assert checkpoint.read_box("seen") == 5
    assert sorted(checkpoint.tensors) == sorted(
        [*(name for name, _ in numbered().named_parameters()), "seen"]
        + [f"optimizer.{key}/{name}" for key in ("exp_avg", "exp_avg_sq") for name, _ in numbered().named_parameters()]
    )


@pytest.mark.parametrize("pair", some(PAIRS, [6, 25, 58, 71]), ids=str)
def test_another_sharding_loads_what_was_saved(eight: Ranks, pair: tuple[Sharding, Sharding], tmp_path: Path) -> None:
    before, after = pair
    of(eight, before[1]).run(save_small, *before, str(tmp_path))
    wrong = of(eight, after[1]).run(load_small, *after, str(tmp_path))
    assert wrong == [[]] * len(wrong)


def test_a_module_is_saved_as_it_was_at_the_call(four: Ranks, tmp_path: Path) -> None:
    four.run(save_small_in_background, "fsdp-tp", (2, 2), str(tmp_path))
    assert verify(tmp_path)["ok"]
    assert four.run(load_small, "fsdp", (4,), str(tmp_path)) == [[]] * 4
