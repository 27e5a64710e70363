"""Context parallelism by all-gather, ring or all-to-all (Ulysses), block by block: the attention of one device.

Shards have 8 tokens (16 if two devices share a row), blocks 6 or fewer, so that the last one begins earlier.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwright.core.plan.attention_kernels import ChosenKernel
from tests.engine_jax.attention_layer import Case, batch, on_one_device, plan_of, program_of, weights_of
from tests.engine_jax.test_attention_under_context import (
    MOVES,
    WITH_HEADS,
    WITH_ROWS,
    balanced,
    case_of,
    close,
    moved,
)

BLOCKS_OF_6 = ChosenKernel(name="blockwise", block=6, why="shards have several")


def in_blocks(case: Case) -> Case:
    return replace(case, way=BLOCKS_OF_6)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("model", ["grouped", "latent"])
def test_it_is_the_attention_of_one_device(model: str, move: str) -> None:
    case = in_blocks(case_of(WITH_HEADS, model, move))
    close(program_of(case)(weights_of(model), batch()), on_one_device(model))


@pytest.mark.parametrize("move", ["gather", "ring"])
def test_rows_may_be_balanced(move: str) -> None:
    case = in_blocks(case_of(WITH_ROWS, "latent", move, balanced=True))
    chunks = plan_of(case).row_chunks
    added, (of_stream, of_weights) = program_of(case)(weights_of(case.model), balanced(chunks, batch()))
    expected, (of_expected_stream, of_expected_weights) = on_one_device(case.model)
    along_rows = balanced(chunks, {"added": expected, "stream": of_expected_stream})
    close((added, of_stream, of_weights), (along_rows["added"], along_rows["stream"], of_expected_weights))


@pytest.mark.parametrize("model", ["grouped", "latent"])
def test_the_collectives_are_the_same(model: str) -> None:
    """Shards are saved for the backward pass, which permutes cotangents and no keys."""
    case = case_of(WITH_ROWS, model, "ring")
    assert sorted(moved(in_blocks(case))) == sorted(moved(case))


def test_in_bfloat16_a_ring_of_blocks_is_as_close_as_one_without() -> None:
    exact, _ = on_one_device("latent")
    far: dict[ChosenKernel | None, float] = {}
    for way in (None, BLOCKS_OF_6):
        case = replace(case_of(WITH_ROWS, "latent", "ring"), dtype="bfloat16", way=way)
        added, _ = program_of(case)(weights_of("latent"), batch())
        far[way] = float(np.linalg.norm(np.asarray(added, np.float32) - exact) / np.linalg.norm(exact))
    assert far[BLOCKS_OF_6] < max(1.2 * far[None], 0.005)
