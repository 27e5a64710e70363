"""Text to token ids: bytes by default, any ``tokenizer.json`` on request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardwright.core.findings.errors import InputError
from shardwright.data.documents import reason, shown
from shardwright.storage.files import exists, read_regular
from shardwright.storage.url import Place, parsed_place

if TYPE_CHECKING:
    import tokenizers

MAX_TOKENIZER_BYTES = 1 << 30

END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
"""End-of-document tokens of published tokenizers, for a tokenizer without ``tokenizer_config.json``."""


class Tokenizer(Protocol):
    """Converts text to token ids. Ids are below ``num_ids``; ``end_of_document`` is one of them."""

    @property
    def name(self) -> str: ...
    @property
    def num_ids(self) -> int: ...
    @property
    def end_of_document(self) -> int: ...

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The ids of each text, as unsigned integers, without special tokens for its beginning or end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteTokenizer:
    """A token for each byte of UTF-8, and id 256 for the end of a document.

    >>> ByteTokenizer().encode(["né".encode()])[0].tolist()
    [110, 195, 169]
    """

    name: str = field(default="bytes", init=False)
    num_ids: int = field(default=257, init=False)
    end_of_document: int = field(default=256, init=False)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTokenizer:
    """A ``tokenizer.json``, run by the ``tokenizers`` library; made by ``read_tokenizer``."""

    name: str
    num_ids: int
    end_of_document: int
    tokenizer: tokenizers.Tokenizer = field(repr=False)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        try:
            encodings = self.tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        except (
            Exception
        ) as error:  # the library raises plain Exception, for example for a word that is not in its vocabulary
            raise InputError(f"tokenizer {self.name} cannot encode the data: {error}") from error
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]


def read_tokenizer(path: str | Place | None, *, vocabulary: int) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``, or ``ByteTokenizer`` if ``path`` is None.

    Its end-of-document token is the ``eos_token`` of the ``tokenizer_config.json`` in the same folder. Without such a
    file, it is the only one of ``END_OF_DOCUMENT_NAMES`` that the tokenizer has.
    Raises InputError if a file cannot be read or is not a tokenizer, if no end-of-document token is known, and if
    the ids do not fit a model's ``vocabulary``.
    """
    tokenizer = ByteTokenizer() if path is None else _from_file(parsed_place(path))
    if tokenizer.num_ids > vocabulary:
        raise InputError(
            f"tokenizer {tokenizer.name} has ids up to {tokenizer.num_ids - 1:,}, so it needs a vocabulary of at least "
            f"{tokenizer.num_ids:,}; the model's is {vocabulary:,}. Enlarge the model's vocabulary, or use a smaller "
            "tokenizer."
        )
    return tokenizer


def _from_file(path: Place) -> FileTokenizer:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(_read_text(path))
    except InputError:
        raise
    except Exception as error:  # the library raises plain Exception for any invalid file
        raise InputError(f"{shown(path)} is not a tokenizer.json that can be read: {error}") from error
    # A file may hold truncation and padding settings; here no token of a text is dropped and none is added.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if not ids:
        raise InputError(f"{shown(path)}: a tokenizer without a single token")
    return FileTokenizer(
        name=shown(path),
        num_ids=max(ids.values()) + 1,
        end_of_document=ids[_end_of_document(path, ids)],
        tokenizer=tokenizer,
    )


def _end_of_document(path: Place, ids: dict[str, int]) -> str:
    config = path.parent / "tokenizer_config.json"
    if _exists(config):
        try:
            settings = json.loads(_read_text(config))
        except ValueError as error:
            raise InputError(f"{shown(config)}: not JSON: {error}") from error
        token = settings.get("eos_token") if isinstance(settings, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            if token not in ids:
                raise InputError(f"{shown(config)}: 'eos_token' is {token!r}, which {shown(path)} does not have")
            return token
    known = [name for name in END_OF_DOCUMENT_NAMES if name in ids]
    if len(known) == 1:
        return known[0]
    found = (
        f"has several candidates ({', '.join(known)})" if known else f"has none of {', '.join(END_OF_DOCUMENT_NAMES)}"
    )
    raise InputError(
        f"{shown(path)}: which token ends a document? It {found}. "
        'Write {"eos_token": "..."} with one of its tokens to ' + f"{shown(config)}."
    )


def _exists(path: Place) -> bool:
    try:
        return exists(path)
    except OSError as error:
        raise InputError(f"cannot read tokenizer {shown(path)}: {reason(error)}") from error


def _read_text(path: Place) -> str:
    try:
        return read_regular(path, MAX_TOKENIZER_BYTES).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{shown(path)} is not UTF-8 text: the byte at offset {error.start}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read tokenizer {shown(path)}: {reason(error)}") from error
