"""Rows, against a reference that computes one token at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.findings.errors import InputError
from shardwright.data import ROW_FIELDS, Corpus, Rows
from tests.data.corpora import END, corpus_of


def row_by_hand(documents: list[str], length: int, index: int) -> list[tuple[int, int, int, int, bool]]:
    """(token, target, segment id, position, valid) of each index of a row."""
    stream = []
    for number, document in enumerate(documents):
        ids = [*document.encode(), END]
        stream += [(token, target, number) for token, target in zip(ids, [*ids[1:], None], strict=True)]
    row, segment, position = [], 0, 0
    before = None
    for token, target, number in stream[index * length : (index + 1) * length]:
        segment, position = (segment, position + 1) if number == before else (segment + 1, 0)
        row.append((token, target or 0, segment, position, target is not None))
        before = number
    return row


texts = st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=8)


@given(texts, st.integers(1, 12))
def test_rows_are_those_of_the_reference(documents: list[str], length: int) -> None:
    corpus = corpus_of(*documents)
    if corpus.num_tokens < length:
        with pytest.raises(InputError):
            Rows(corpus=corpus, length=length)
        return
    rows = Rows(corpus=corpus, length=length)
    assert 0 <= corpus.num_tokens - len(rows) * length < length
    for index in range(len(rows)):
        row = rows[index]
        assert {name: values.dtype for name, values in row.items()} == dict(ROW_FIELDS)
        assert list(zip(*(values.tolist() for values in row.values()), strict=True)) == row_by_hand(
            documents, length, index
        )


@given(texts, st.integers(1, 12))
def test_each_token_but_a_documents_first_is_a_target_once(documents: list[str], length: int) -> None:
    corpus = corpus_of(*documents, "a" * length)
    rows = Rows(corpus=corpus, length=length)
    targets = [token for row in map(rows.__getitem__, range(len(rows))) for token in row["targets"][row["valid"]]]
    expected = [token for document in (*documents, "a" * length) for token in [*document.encode()[1:], END]]
    assert targets == expected[: len(targets)]
    assert len(expected) - len(targets) <= corpus.num_tokens - len(rows) * length


def test_no_row_shares_memory_with_the_corpus() -> None:
    rows = Rows(corpus=corpus_of("abc", "def"), length=4)
    rows[0]["tokens"][:] = 0
    assert rows[0]["tokens"].tolist() == [97, 98, 99, END]


def test_a_corpus_that_fills_no_row() -> None:
    corpus = corpus_of("x" * 1999)
    assert len(Rows(corpus=corpus, length=2000)) == 1
    with pytest.raises(InputError) as caught:
        Rows(corpus=corpus, length=2001)
    assert str(caught.value) == (
        "memory has 2,000 tokens (by tokenizer bytes), fewer than the 2,001 of one row. "
        "Give more text, or a shorter length."
    )


def test_ids_beyond_sixteen_bits_are_kept() -> None:
    corpus = Corpus(
        source="", tokenizer="", tokens=np.array([70_000, 128_000, 1], np.uint32), ends=np.array([3], np.int64)
    )
    row = Rows(corpus=corpus, length=3)[0]
    assert row["tokens"].tolist() == [70_000, 128_000, 1]
    assert row["targets"].tolist() == [128_000, 1, 0]
