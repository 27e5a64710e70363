"""Packs documents into rows of one length, and defines the fields of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from shardwright.core.findings.errors import InputError
from shardwright.data.corpus import Corpus

Row = dict[str, np.ndarray]
"""One array [length] per field of ``ROW_FIELDS``, or [rows, length] for several rows."""

ROW_FIELDS = MappingProxyType(
    {
        "tokens": np.dtype(np.int32),
        "targets": np.dtype(np.int32),
        "segments": np.dtype(np.int32),
        "positions": np.dtype(np.int32),
        "valid": np.dtype(np.bool_),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a corpus: row r is its tokens r * length to (r + 1) * length, and depends only on r.

    Documents follow one another without padding. If a document does not fit into a row, it continues in the next row
    as an ordinary segment. The last tokens of the corpus, if they are fewer than ``length``, are in
    no row.

    ``tokens``     the ids.
    ``targets``    the next id of the document, even if it is in the next row; 0 where not valid.
    ``segments``   1, 2, ... for the documents of the row: a token attends only to tokens of its own segment. 0 is padding.
    ``positions``  0, 1, ... within the segment.
    ``valid``      whether the target counts in the loss: everywhere but on end-of-document tokens, which the first token of
                   another document follows. So the end-of-document token is a target, and no target is in another document.

    >>> from shardwright.data.tokens import ByteTokenizer
    >>> corpus = Corpus(source="", tokenizer="bytes", tokens=np.array([97, 98, 99, 256, 100, 256, 101, 256], np.uint16),
    ...                 ends=np.array([4, 6, 8]))
    >>> rows = Rows(corpus=corpus, length=3)
    >>> len(rows)
    2
    >>> for name, values in rows[1].items():
    ...     print(f"{name:12}", *(values * 1))
    tokens       256 100 256
    targets      0 256 0
    segments     1 2 2
    positions    0 0 1
    valid        0 1 0

    Raises InputError if the corpus does not fill one row.
    """

    corpus: Corpus
    length: int

    def __post_init__(self) -> None:
        assert self.length > 0, self.length
        if len(self) == 0:
            raise InputError(
                f"{self.corpus.source} has {self.corpus.num_tokens:,} tokens (by tokenizer {self.corpus.tokenizer}), "
                f"fewer than the {self.length:,} of one row. Give more text, or a shorter length."
            )

    def __len__(self) -> int:
        return self.corpus.num_tokens // self.length

    def __getitem__(self, index: int) -> Row:
        """Row ``index``, 0 <= index < len(self)."""
        assert 0 <= index < len(self), (index, len(self))
        start = index * self.length
        stop = start + self.length
        window = self.corpus.tokens[start : stop + 1]

        # Only ends after the row's start. The next segment begins at each, counted from the row's start.
        ends = self.corpus.ends
        ends = ends[np.searchsorted(ends, start, side="right") : np.searchsorted(ends, stop, side="right")] - start
        begins = np.zeros(self.length, np.int32)
        begins[0] = 1
        begins[ends[ends < self.length]] = 1
        segments = np.cumsum(begins, dtype=np.int32)
        first = np.flatnonzero(begins).astype(np.int32)
        valid = np.ones(self.length, np.bool_)
        valid[ends - 1] = False

        targets = np.zeros(self.length, np.int32)
        targets[: window.size - 1] = window[1:]
        targets[~valid] = 0
        return {
            "tokens": window[: self.length].astype(np.int32),
            "targets": targets,
            "segments": segments,
            "positions": np.arange(self.length, dtype=np.int32) - first[segments - 1],
            "valid": valid,
        }


def reordered(row: Row, chunks: Sequence[int]) -> Row:
    """The row, or rows, with equal chunks along the last dim in the order ``chunks``: the same order in every field.

    >>> reordered({"tokens": np.arange(8)}, (0, 3, 1, 2))["tokens"]
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    if len(chunks) == 1:
        return row
    return {name: _reordered(values, chunks) for name, values in row.items()}


def _reordered(values: np.ndarray, chunks: Sequence[int]) -> np.ndarray:
    chunked = values.reshape(*values.shape[:-1], len(chunks), -1)
    return chunked[..., list(chunks), :].reshape(values.shape)
