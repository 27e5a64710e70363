"""Small corpora for the tests of rows and batches."""

from __future__ import annotations

import numpy as np

from shardwright.data import Corpus

END = 256


def corpus_of(*documents: str) -> Corpus:
    """A corpus as ``read_corpus`` makes it of the bytes: a second, slower implementation."""
    tokens: list[int] = []
    ends: list[int] = []
    for document in documents:
        tokens += [*document.encode(), END]
        ends.append(len(tokens))
    return Corpus(source="memory", tokenizer="bytes", tokens=np.array(tokens, np.uint16), ends=np.array(ends, np.int64))
