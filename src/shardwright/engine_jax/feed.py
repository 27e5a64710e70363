"""From the corpus to the arrays of a step, on the devices that the plan gives each row and token to."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding

from shardwright.core.plan import Plan
from shardwright.core.run import RunOptions
from shardwright.data import Batch, Batches, Corpus, Rows, read_corpus, read_tokenizer

ENGINE_NAMES = {"segment_ids": "segments"}
"""What the engine calls a field of a row, where the data calls it otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The rows that a run reads, and what tells them from any other."""

    rows: Rows
    corpus: Corpus
    digest: str


def open_source(options: RunOptions, plan: Plan) -> Source:
    """Read and tokenise the run's text. Raises InputError for what cannot be read, is empty or does not fit."""
    tokenizer = read_tokenizer(options.tokenizer, vocabulary=plan.request.table.sizes["vocab"])
    corpus = read_corpus(options.data, tokenizer)
    return Source(rows=Rows(corpus=corpus, length=plan.request.length), corpus=corpus, digest=corpus.digest())


def batches(source: Source, plan: Plan, seed: int, next_row: int) -> AbstractContextManager:
    """An endless iterator over the steps from global row ``next_row`` on, read ahead while the block lasts."""
    request = plan.request
    ordered = Batches(rows=source.rows, batch=request.batch, seed=seed, start_row=next_row, pieces=plan.row_pieces)
    return ordered.prefetched()


def on_devices(batch: Batch, sharding: NamedSharding) -> Mapping[str, jax.Array]:
    """The arrays of a step, [batch, length], each device with its own rows and tokens."""
    return jax.device_put({ENGINE_NAMES.get(name, name): array for name, array in batch.arrays.items()}, sharding)
