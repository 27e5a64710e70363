"""The tokenizer that a run was given stays with it: for a resumed run, and for an export."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.runs import run
from shardwright.training.options import RunOptions, Silent
from shardwright.training.published import TOKENIZER, TOKENIZER_FILES
from tests.interop.tokenizer_beside import WORDS, add_tokenizer
from tests.runs.counting import NOBODY, Counting, made, options, plan_of
from tests.runs.counting import ROWS as NUM_ROWS


def tokenizer(folder: Path, words: tuple[str, ...] = WORDS) -> Path:
    folder.mkdir()
    add_tokenizer(folder, words)
    return (folder / TOKENIZER).rename(folder / "mine.json")


def said(run_options: RunOptions) -> list[str]:
    shown = Silent()
    engine = Counting(range(NUM_ROWS), {"counting": "1"})
    run(run_options, plan_of("fsdp"), shown, connection=NOBODY, make_engine=made(engine))
    return shown.messages


def test_a_resumed_run_reads_by_the_tokenizer_of_the_run(tmp_path: Path) -> None:
    given = tokenizer(tmp_path / "given")
    first = options(tmp_path)
    lines = said(RunOptions(steps=6, out=first.out, data=first.data, seed=3, tokenizer=given, stop_after=3))
    kept = first.out / "published" / TOKENIZER
    assert f"copied to {kept.parent}: {TOKENIZER}" in lines
    assert kept.read_bytes() == given.read_bytes()
    shutil.rmtree(given.parent)
    lines = said(RunOptions(steps=6, out=first.out, data=first.data, seed=3, resume=True))
    assert any(f"(tokenizer: {kept}" in line for line in lines), lines
    assert not any(line.startswith("copied to") for line in lines)


def test_another_tokenizer_replaces_it_and_what_belongs_to_it(tmp_path: Path) -> None:
    first, second = tokenizer(tmp_path / "first"), tokenizer(tmp_path / "second", ("line", "text", *WORDS))
    common = options(tmp_path)
    said(RunOptions(steps=6, out=common.out, data=common.data, seed=3, tokenizer=first, stop_after=3))
    kept = common.out / "published"
    (kept / "tokenizer_config.json").write_text("{}")
    again = RunOptions(steps=6, out=common.out, data=common.data, seed=3, tokenizer=second, resume=True)
    with pytest.raises(InputError, match="data"):
        said(again)
    assert (kept / TOKENIZER).read_bytes() == first.read_bytes()
    said(RunOptions(steps=6, out=common.out, data=common.data, seed=3, tokenizer=second, resume=True, change=("data",)))
    assert (kept / TOKENIZER).read_bytes() == second.read_bytes()
    assert [name for name in TOKENIZER_FILES if (kept / name).exists()] == [TOKENIZER]
