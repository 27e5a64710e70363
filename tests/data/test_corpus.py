"""The corpus: all tokens of all documents, compactly."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwright.core.findings.errors import InputError
from shardwright.data import ByteTokenizer, documents, read_corpus
from shardwright.data import corpus as corpus_module
from tests.data.corpora import END, corpus_of


def folder_of(path: Path, *texts: str) -> Path:
    path.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (path / f"{number:03}.txt").write_text(text)
    return path


@pytest.mark.parametrize("batch_bytes", [1, 5, 1 << 20])
def test_documents_follow_one_another(batch_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "_BATCH_BYTES", batch_bytes)
    corpus = read_corpus(folder_of(tmp_path / "d", "abc", "", "é", "d" * 9), ByteTokenizer())
    expected = corpus_of("abc", "é", "d" * 9)
    np.testing.assert_array_equal(corpus.tokens, expected.tokens)
    np.testing.assert_array_equal(corpus.ends, expected.ends)
    assert (corpus.tokens.dtype, corpus.ends.dtype) == (np.uint16, np.int64)
    assert (corpus.num_documents, corpus.num_tokens) == (3, 17)
    assert corpus.source == str(tmp_path / "d")


def test_a_corpus_is_read_only(tmp_path: Path) -> None:
    corpus = read_corpus(folder_of(tmp_path / "d", "abc"), ByteTokenizer())
    with pytest.raises(ValueError, match="read-only"):
        corpus.tokens[0] = 1


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    class Wide:
        name, num_ids, end_of_document = "wide", (1 << 16) + 1, 1 << 16

        def encode(self, texts: list[bytes]) -> list[np.ndarray]:
            return [np.array([65_535, 65_536], np.uint32) for _ in texts]

    corpus = read_corpus(folder_of(tmp_path / "d", "a", "b"), Wide())
    assert corpus.tokens.dtype == np.uint32
    assert corpus.tokens.tolist() == [65_535, 65_536, 65_536] * 2


def test_empty_corpora_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_corpus(folder_of(tmp_path / "d", "", ""), ByteTokenizer())
    assert str(caught.value) == f"no text in {tmp_path / 'd'}: 2 documents, all empty"
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(InputError) as caught:
        read_corpus(tmp_path / "a.jsonl", ByteTokenizer())
    assert str(caught.value) == f"no text in {tmp_path / 'a.jsonl'}: 0 documents, all empty"


def test_stdlib_in_under_two_seconds() -> None:
    start_s = time.thread_time()
    corpus = read_corpus("stdlib", ByteTokenizer())
    assert time.thread_time() - start_s < 2
    texts = [document.text for document in documents("stdlib") if document.text]
    assert corpus.num_tokens == sum(map(len, texts)) + len(texts)
    starts = [0, *corpus.ends[:-1]]
    for number in (0, 1, 100, len(texts) - 1):
        start, stop = starts[number], corpus.ends[number]
        assert corpus.tokens[start : stop - 1].astype(np.uint8).tobytes() == texts[number]
        assert corpus.tokens[stop - 1] == END


def test_different_corpora_have_different_digests() -> None:
    corpus = corpus_of("ab", "cd")
    assert corpus.digest() == corpus_of("ab", "cd").digest() == replace(corpus, source="elsewhere").digest()
    others = [corpus_of("ab", "ce"), corpus_of("abcd"), corpus_of("ab"), replace(corpus, ends=corpus.ends[1:])]
    assert len({corpus.digest(), *(other.digest() for other in others)}) == 5
    assert corpus.digest() == "af7fe95f0aceb203cac07dcc7ae2fc87"
