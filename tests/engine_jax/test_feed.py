"""The arrays of a step on the devices: rows and tokens are sharded as the plan says, in the plan's order."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from shardwright import Request, load_layout, make_plan, model_table
from shardwright.data import Batches, Rows
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.feed import feed_of
from shardwright.engine_jax.training.step import batch_sharding
from shardwright.runs.source import Source, batches
from tests.data.corpora import corpus_of

ROWS, LENGTH = 4, 16


def test_the_rows_of_a_process_are_read_in_ascending_order() -> None:
    """Its devices can be anywhere in the mesh."""
    rows = {"a device": (slice(1000, 1002), slice(None)), "another": (slice(6, 8), slice(None)), "not here": None}
    sharding = SimpleNamespace(addressable_devices_indices_map=lambda _: rows)
    plan = SimpleNamespace(request=SimpleNamespace(batch=2048, length=LENGTH))
    assert feed_of(plan, sharding).offsets == (6, 7, 1000, 1001)  # type: ignore[arg-type]


def test_a_device_gets_both_ends_of_its_rows() -> None:
    corpus = corpus_of(*("abcdefghijklmnopqrstuvwxyz"[: 5 + n % 20] for n in range(40)))
    source = Source(rows=Rows(corpus=corpus, length=LENGTH), corpus=corpus, digest="")
    request = Request(
        layout=load_layout("cp"),
        table=model_table("llama3-test"),
        batch=ROWS,
        length=LENGTH,
        mesh_sizes={"fsdp": 2, "context": 4},
        load_balanced=True,
    )
    plan = make_plan(request)
    feed = feed_of(plan, batch_sharding(plan, device_mesh(plan.mesh)))
    with batches(source, plan, feed.offsets, 0, 8) as steps:
        placed = feed.on_devices(next(steps))
    text = Batches(rows=source.rows, batch=ROWS, seed=0, start_row=8).read(0).arrays
    # Device 6 of the mesh fsdp 2 x context 4: the last rows, and the third of four chunks from either end.
    rows, tokens = slice(2, 4), [4, 5, 10, 11]
    for name, array in placed.items():
        local = next(shard.data for shard in array.addressable_shards if shard.device.id == 6)
        np.testing.assert_array_equal(local, text[name][rows][:, tokens])
