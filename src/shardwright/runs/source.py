"""The rows that a run reads: its text, opened once, and its batches, read ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from shardwright.core.plan.plan import Plan
from shardwright.data import Batch, Batches, Corpus, Rows, read_corpus, read_tokenizer
from shardwright.storage.url import Place
from shardwright.training.options import RunOptions
from shardwright.training.published import FOLDER, TOKENIZER, found, published_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The rows that a run reads, with their corpus and its digest."""

    rows: Rows
    corpus: Corpus
    digest: str


def open_source(options: RunOptions, plan: Plan) -> Source:
    """Read and tokenise the run's text. Raises InputError for what cannot be read, is empty or does not fit."""
    tokenizer = read_tokenizer(tokenizer_of(options), vocabulary=plan.request.table.sizes["vocab"])
    corpus = read_corpus(options.data, tokenizer)
    return Source(rows=Rows(corpus=corpus, length=plan.request.length), corpus=corpus, digest=corpus.digest())


def tokenizer_of(options: RunOptions) -> Place | None:
    """The tokenizer that is given; else the one that the run had before, or that came with its weights; else None, which is bytes.

    A run that goes on finds it in its own folder, or in that of its checkpoints, where it was copied to. Raises InputError for a
    store that cannot be read.
    """
    if options.tokenizer is not None:
        return options.tokenizer
    goes_on = options.resume or options.resume_from is not None
    folders = list(published_folders(options)) if goes_on else []
    if options.weights is not None:
        folders.append(published_folder(options.weights))
    return next((folder / TOKENIZER for folder in folders if found(folder, [TOKENIZER])), None)


def published_folders(options: RunOptions) -> tuple[Place, ...]:
    """Where a run keeps the files that belong to its weights: in its own folder, and in that of its checkpoints."""
    return tuple(dict.fromkeys((options.out / FOLDER, options.saved_under / FOLDER)))


def batches(
    source: Source, plan: Plan, offsets: Sequence[int], seed: int, next_row: int
) -> AbstractContextManager[Iterator[Batch]]:
    """An endless iterator over this process's rows of each step, from global row ``next_row`` on, read ahead.

    ``offsets``: the rows of a step that this process reads, counted from the step's first row, ascending.
    """
    batch = plan.request.batch
    steps = Batches(rows=source.rows, batch=batch, seed=seed, start_row=next_row, chunks=plan.row_chunks)
    return steps.prefetched(offsets)
