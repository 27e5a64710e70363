"""A tokenised source in compact form: one array of ids, and the end of each document in it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing

from shardwright.core.findings.errors import InputError
from shardwright.data.documents import Document, documents, shown
from shardwright.data.tokens import Tokenizer

_BATCH_BYTES = 2 << 20
"""Bytes of text passed to a tokenizer at a time: enough for all its threads, little compared with the corpus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The documents of a source, each followed by the end-of-document token.

    ``tokens``: ids [num_tokens], uint16 where they fit, otherwise uint32.
    ``ends``: int64 [num_documents], the index in ``tokens`` one past each document's end-of-document token.
    Documents without text are omitted.
    """

    source: str
    tokenizer: str
    tokens: np.ndarray
    ends: np.ndarray

    @property
    def num_tokens(self) -> int:
        return self.tokens.size

    @property
    def num_documents(self) -> int:
        return self.ends.size

    def digest(self) -> str:
        """A digest of the content, 32 hexadecimal digits, independent of the source's path.

        Saved with a run and compared when it is resumed: a run must not continue on another corpus.
        """
        hasher = hashlib.blake2b(digest_size=16)
        for values in (self.tokens, self.ends):
            hasher.update(values.astype(values.dtype.newbyteorder("<"), copy=False).data)
        return hasher.hexdigest()


def read_corpus(source: str | Path, tokenizer: Tokenizer) -> Corpus:
    """Read and tokenise an entire source, once.

    Raises InputError for whatever ``documents`` refuses, and for a source without any text.
    """
    # array grows in place; concatenating arrays would need the memory twice.
    tokens = array("H" if tokenizer.num_ids <= 1 << 16 else "I")
    dtype = np.dtype(tokens.typecode)
    ends = array("q")
    num_documents = 0
    for batch in _batched(documents(source)):
        num_documents += len(batch)
        for ids in tokenizer.encode([document.text for document in batch]):
            if ids.size:
                tokens.frombytes(ids.astype(dtype).tobytes())
                tokens.append(tokenizer.end_of_document)
                ends.append(len(tokens))
    if not ends:
        raise InputError(f"no text in {shown(source)}: {num_documents} documents, all empty")
    return Corpus(
        source=shown(source),
        tokenizer=tokenizer.name,
        tokens=_read_only(tokens, dtype),
        ends=_read_only(ends, np.int64),
    )


def _read_only(values: array[int], dtype: np.typing.DTypeLike) -> np.ndarray:
    """The same memory as a NumPy array."""
    view = np.frombuffer(values, dtype)
    view.setflags(write=False)
    return view


def _batched(items: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_bytes = 0
    for document in items:
        batch.append(document)
        num_bytes += len(document.text)
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
