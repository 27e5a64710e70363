"""Tokenizers: bytes, files that the ``tokenizers`` library writes in the test, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from shardwright.core.findings.errors import InputError
from shardwright.data import ByteTokenizer, read_corpus, read_tokenizer

WORDS = {"[UNK]": 0, "the": 1, "cat": 2, "sat": 3, "<s>": 4, "</s>": 5}


def saved(path: Path, words: dict[str, int] = WORDS, unknown: str | None = "[UNK]") -> tokenizers.Tokenizer:
    model = models.WordLevel(words, unk_token=unknown) if unknown else models.WordLevel(words)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return tokenizer


def refusal(path: Path, vocabulary: int = 100) -> str:
    with pytest.raises(InputError) as caught:
        read_tokenizer(path, vocabulary=vocabulary)
    return str(caught.value)


def test_bytes_are_the_default() -> None:
    tokenizer = read_tokenizer(None, vocabulary=257)
    assert tokenizer == ByteTokenizer()
    text = "é\x00\n".encode()
    assert [ids.tolist() for ids in tokenizer.encode([text, b""])] == [list(text), []]


def test_bytes_need_257_ids() -> None:
    with pytest.raises(InputError) as caught:
        read_tokenizer(None, vocabulary=256)
    assert str(caught.value) == (
        "tokenizer bytes has ids up to 256, so it needs a vocabulary of at least 257; the model's is 256. "
        "Enlarge the model's vocabulary, or use a smaller tokenizer."
    )


def test_a_file_encodes_as_its_library_does(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    library = saved(path)
    tokenizer = read_tokenizer(path, vocabulary=6)
    assert (tokenizer.name, tokenizer.num_ids, tokenizer.end_of_document) == (str(path), 6, 5)
    found = tokenizer.encode([b"the cat sat", b"", b"the dog"])
    assert [ids.tolist() for ids in found] == [library.encode(text).ids for text in ("the cat sat", "", "the dog")]
    assert found[2].tolist() == [1, 0]


def test_settings_saved_in_a_file_add_and_truncate_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    library = saved(path)
    library.enable_truncation(2)
    library.enable_padding(length=9)
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 4), ("</s>", 5)]
    )
    library.save(str(path))
    (ids,) = read_tokenizer(path, vocabulary=6).encode([b"the cat sat the cat"])
    assert ids.tolist() == [1, 2, 3, 1, 2]


def test_a_file_larger_than_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    saved(path, {"[UNK]": 0, "</s>": 128_255})
    assert refusal(path, vocabulary=2048) == (
        f"tokenizer {path} has ids up to 128,255, so it needs a vocabulary of at least 128,256; the model's is 2,048. "
        "Enlarge the model's vocabulary, or use a smaller tokenizer."
    )
    assert read_tokenizer(path, vocabulary=128_256).num_ids == 128_256


def test_added_tokens_count(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    library = saved(path)
    library.add_special_tokens(["<new>"])
    library.save(str(path))
    assert "needs a vocabulary of at least 7; the model's is 6" in refusal(path, vocabulary=6)


@pytest.mark.parametrize("token", ["sat", {"content": "sat", "special": True}])
def test_the_config_in_the_same_folder_gives_the_end_of_document_token(token: object, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    saved(path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    assert read_tokenizer(path, vocabulary=6).end_of_document == 3


def test_a_config_that_does_not_fit(tmp_path: Path) -> None:
    path, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    saved(path)
    config.write_text('{"eos_token": "<end>"}')
    assert refusal(path) == f"{config}: 'eos_token' is '<end>', which {path} does not have"
    config.write_text("{")
    assert refusal(path).startswith(f"{config}: not JSON: Expecting property name")


def test_no_end_of_document_token_is_known(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    saved(path, {"[UNK]": 0})
    assert refusal(path) == (
        f"{path}: which token ends a document? It has none of <|endoftext|>, <|end_of_text|>, </s>, <eos>, "
        '<｜end▁of▁sentence｜>. Write {"eos_token": "..."} with one of its tokens to '
        f"{tmp_path}/tokenizer_config.json."
    )
    saved(path, {"[UNK]": 0, "</s>": 1, "<eos>": 2})
    assert "It has several candidates (</s>, <eos>)" in refusal(path)


def test_files_that_are_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    assert refusal(path) == f"cannot read tokenizer {path}: No such file or directory"
    assert refusal(tmp_path) == f"cannot read tokenizer {tmp_path}: Is a directory"
    for text in ("", "{", "{}", "[]", '{"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}'):
        path.write_text(text)
        assert refusal(path).startswith(f"{path} is not a tokenizer.json that can be read: ")
    path.write_bytes(b"\xff")
    assert refusal(path) == f"{path} is not UTF-8 text: the byte at offset 0"
    saved(path, {}, unknown=None)
    assert refusal(path) == f"{path}: a tokenizer without a single token"


def test_a_word_that_the_tokenizer_cannot_encode(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    saved(path, {"the": 0, "</s>": 1}, unknown=None)
    (tmp_path / "a.txt").write_text("the dog")
    with pytest.raises(InputError) as caught:
        read_corpus(tmp_path / "a.txt", read_tokenizer(path, vocabulary=2))
    assert str(caught.value).startswith(f"tokenizer {path} cannot encode the data: WordLevel error")
