"""A tokenizer as a model folder has it, made by its library."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers

WORDS = ("[UNK]", "def", "return", "the", "of", "import", "self", "(", ")", "_", ".", "</s>")


def add_tokenizer(folder: Path, words: tuple[str, ...] = WORDS) -> None:
    """tokenizer.json and tokenizer_config.json."""
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
