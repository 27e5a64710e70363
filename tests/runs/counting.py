"""An engine without a framework, for tests of runs: it adds up the tokens that it reads, and the sum is its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from shardwright import Plan, Request, load_layout, make_plan, model_table
from shardwright.checkpoint import OwnedBox, TensorInfo
from shardwright.core.boxes.box import Box
from shardwright.data import Batch, Batches, Rows, read_corpus, read_tokenizer
from shardwright.runs import Connection, HeldReplica, MakeEngine, StepMetrics, Weights, run
from shardwright.training.options import RunOptions, RunOutcome, Silent

ROWS, LENGTH = 4, 16
INFO = TensorInfo(name="sums", shape=(ROWS, 2), dtype="int64")


class Counting:
    """``sums_RW``: by row of a step, all tokens that were read there, and how many. Only those of ``offsets`` are known."""

    def __init__(self, offsets: Sequence[int], versions: Mapping[str, str]) -> None:
        self.offsets, self.versions = offsets, versions
        self.calls: list[str] = []
        self.overflow_at: int | None = None
        self.peak_bytes: int | None = None
        self.device_name = "cpu"
        self._sums_RW = np.zeros(INFO.shape, np.int64)
        self._step = 0

    def begin(self, checkpoint: Weights | None, seed: int, *, weights_only: bool = False) -> int:
        assert not weights_only
        self.calls.append(f"begin {seed}")
        if checkpoint is not None:
            self._sums_RW, self._step = checkpoint.read_box(INFO.name).copy(), checkpoint.point.step
        return self._step

    def prepare(self) -> None:
        self.calls.append("prepare")

    def step(self, batch: Batch, before_update: Callable[[], None]) -> StepMetrics:
        before_update()
        self._step += 1
        tokens_RL = batch.arrays["tokens"]
        for place, offset in enumerate(self.offsets):
            self._sums_RW[offset] += [tokens_RL[place].sum(), LENGTH]
        loss, tokens = self._sums_RW.sum(0).tolist()
        return StepMetrics(loss=loss, grad_norm=1.0, tokens=tokens, overflow=int(self._step == self.overflow_at))

    def tensors(self) -> Sequence[TensorInfo]:
        return [INFO]

    def replicas(self) -> Iterator[OwnedBox]:
        yield from ()

    def weight_replicas(self) -> Iterator[HeldReplica]:
        yield from ()

    def boxes(self) -> Iterator[OwnedBox]:
        for offset in self.offsets:
            part = self._sums_RW[offset : offset + 1]
            yield OwnedBox(name=INFO.name, box=Box((offset, 0), (offset + 1, 2)), array=part, lasts="until the update")


def counting(*, offsets: Sequence[int] = range(ROWS), version: str = "1", name: str = "counting") -> Counting:
    return Counting(offsets, {name: version})


def made(engine: Counting) -> MakeEngine:
    """What makes this engine and no other."""
    return lambda *_: engine


@cache
def plan_of(layout: str = "fsdp") -> Plan:
    request = Request(
        layout=load_layout(layout), table=model_table("llama3-test"), batch=ROWS, length=LENGTH, mesh_sizes={"fsdp": 2}
    )
    return make_plan(request)


def options(folder: Path) -> RunOptions:
    """Of a run of six steps, of a text that is made where there is none yet."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"line {number} of a text, {number * number}\n" for number in range(200)))
    return RunOptions(steps=6, out=folder / "out", data=str(text), seed=3)


NOBODY = Connection(connect=lambda _: None, disconnect=lambda: None)


def go(
    engine: Counting, run_options: RunOptions, layout: str = "fsdp", connection: Connection = NOBODY, **changes
) -> RunOutcome:
    """A run with some options changed by ``changes``."""
    return run(
        replace(run_options, **changes), plan_of(layout), Silent(), connection=connection, make_engine=made(engine)
    )


def sums(run_options: RunOptions, steps: int) -> list[int]:
    """The sum of all tokens after each step, read without a run."""
    corpus = read_corpus(run_options.data, read_tokenizer(None, vocabulary=2048))
    batches = Batches(rows=Rows(corpus=corpus, length=LENGTH), batch=ROWS, seed=run_options.seed)
    return np.cumsum([batches.read(step).arrays["tokens"].sum() for step in range(steps)]).tolist()
