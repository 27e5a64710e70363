"""The memory that a run on JAX ends with is that of its steps, not what XLA took while it compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.engine_jax.training.run import JaxEngine
from tests.engine_jax.commands import FSDP, LLAMA3, compiled_once, metrics, train

MUCH = 1 << 50


@pytest.fixture(scope="module", autouse=True)
def one_compilation() -> Iterator[None]:
    with compiled_once():
        yield


def measured(held: Iterator[int | None], out: Path, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """The bytes in the last line of a run on devices that have held these at most, whenever they are asked."""
    monkeypatch.setattr(JaxEngine, "_most_bytes", lambda _: next(held))
    train([*LLAMA3, *FSDP, "--steps", "2"], out)
    return metrics(out)[-1].get("measured_bytes")


def test_a_peak_before_the_first_step_gives_way_to_the_program_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(iter([MUCH] * 5), tmp_path, monkeypatch)
    assert found is not None
    # More than a rank's state of 24 bytes a weight, and less than all that XLA took.
    assert 100_000 < found < 100_000_000


def test_a_peak_of_steps_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(iter([MUCH, *[MUCH + 1] * 4]), tmp_path, monkeypatch) == MUCH + 1


def test_devices_that_do_not_say_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(iter([None] * 5), tmp_path, monkeypatch) is None
